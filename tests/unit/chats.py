"""Chat templates of several shapes, tokenizers that read them, and a small set of messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

MARKS = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"]
TEXTS = [
    "hello there, hi you",
    "the cat sat on the mat\n\nuser assistant system model",
    "what is it? it is this <think>",
]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nyou are it<|im_end|>\n' }}{% endif %}" + CHATML
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED_SHORT = TAGGED.replace(
    " + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}", " }}{% endgeneration %}{{ '<|im_end|>\n' }}"
)
STRIPS = (  # the thoughts of all answers but the last, as reasoning models do
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMELESS = CHATML.replace("{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}", "")
ENDLESS = (
    "{% for m in messages %}{{ '## ' + m['role'] + ':' + '\n' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '## assistant:\n' }}{% endif %}"
)
LAST_EOS = ENDLESS.replace(
    "{% if add", "{% if messages[-1]['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% if add"
)
ENDED_TWICE = CHATML.replace("{% if add", "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}{% if add")
# The name of each shape: its template, what follows an answer, and whether it writes a BOS.
SHAPES = {
    "chatml": (CHATML, "<|im_end|>", False),
    "default system": (DEFAULT_SYSTEM, "<|im_end|>", False),
    "llama 2": (LLAMA2, " </s>", True),
    "gemma": (GEMMA, "<end_of_turn>", True),
    "tagged": (TAGGED, "<|im_end|>", False),
    "tagged without end": (TAGGED_SHORT, "<|im_end|>", False),
    "no generation prompt": (NAMELESS, "<|im_end|>", False),
    "ended twice": (ENDED_TWICE, "<|im_end|>", False),
}


def chat_tokenizer(template: str | None, words: bool = False, eos: str = "</s>") -> PreTrainedTokenizerFast:
    """A small BPE with the marks of all shapes; ``words``: with sentencepiece's word starts instead of bytes."""
    core = Tokenizer(BPE(unk_token="<unk>") if words else BPE())
    if words:
        core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace("▁", "first"), decoders.Metaspace("▁", "first")
    else:
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = list("abcdefghijklmnopqrstuvwxyz,.?<>/#:\n▁") if words else pre_tokenizers.ByteLevel.alphabet()
    special = [AddedToken(mark, special=True, normalized=False) for mark in (["<unk>"] if words else []) + MARKS]
    core.train_from_iterator(
        TEXTS * 3,
        BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token=eos,
        pad_token="<pad>",
        unk_token="<unk>" if words else None,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def messages(*texts: str) -> list[dict[str, Any]]:
    """The user's and the assistant's turns by turns."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def lines(path: Path, *rows: object) -> Path:
    """A JSONL file of rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
