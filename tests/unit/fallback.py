"""A tokenizer of sentencepiece's kind."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast


def byte_fallback(letters: str) -> PreTrainedTokenizerFast:
    """As of sentencepiece: spaces are ▁, the first one of a text is stripped, all but ``letters`` becomes bytes."""
    tokens = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", *letters, "▁a"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", clean_up_tokenization_spaces=False)
