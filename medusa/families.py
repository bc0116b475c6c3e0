"""The families that are tested: a tiny configuration of each, 65 symbols, two layers, windows of 8 where it has any."""

from __future__ import annotations

from typing import Any

VOCAB = 65
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_GPT_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "tie_word_embeddings": False}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_SLIDING = {**_GROUPED, "sliding_window": 8}
_HYBRID = {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
_HEADS = {"head_dim": 8, "tie_word_embeddings": False}
# Plain loops over the experts: the fused kernels know no fp64.
_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
# family: its classes' common prefix, what else differs in their names, and its config
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "", _GROUPED),
    "gpt2": ("GPT2", "", _GPT_SIZES),
    "neox": ("GPTNeoX", "", _SIZES),
    "mistral": ("Mistral", "", _SLIDING),
    "gemma2": ("Gemma2", "", {**_SLIDING, **_HEADS, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3", "Text", {**_HYBRID, **_HEADS}),
    "phi": ("Phi", "", _SIZES),
    "gptj": ("GPTJ", "", {**_GPT_SIZES, "rotary_dim": 4}),
    "cohere": ("Cohere", "", {**_GROUPED, "logit_scale": 0.25}),
    "granite": ("Granite", "", {**_GROUPED, "logits_scaling": 4.0}),
    "qwen2": ("Qwen2", "", {**_SLIDING, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3", "", {**_GROUPED, **_HEADS}),
    "phi3": ("Phi3", "", _SLIDING),
    "opt": (
        "OPT",
        "",
        {
            **{key: value for key, value in _SIZES.items() if key != "intermediate_size"},
            "ffn_dim": 64,
            "word_embed_proj_dim": 32,
            "tie_word_embeddings": False,
        },
    ),
    "falcon": ("Falcon", "", {**_SIZES, "alibi": False, "tie_word_embeddings": False}),
    "stablelm": ("StableLm", "", _GROUPED),
    "starcoder2": ("Starcoder2", "", {**_SLIDING, "tie_word_embeddings": False}),
    "cohere2": ("Cohere2", "", {**_HYBRID, "logit_scale": 0.25, "tie_word_embeddings": False}),
    "smollm3": ("SmolLM3", "", _GROUPED),
    "olmo3": ("Olmo3", "", _HYBRID),
    "mixtral": ("Mixtral", "", {**_SLIDING, **_EXPERTS, "num_local_experts": 4}),
    "gemma": ("Gemma", "", {**_GROUPED, **_HEADS}),
    "gemma4": (
        "Gemma4",
        "Text",
        {
            **_HYBRID,
            **_HEADS,
            "global_head_dim": 8,
            "num_global_key_value_heads": 2,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "glm4": ("Glm4", "", {**_GROUPED, "head_dim": 8}),
    "olmo2": ("Olmo2", "", _GROUPED),
    "qwen3_moe": ("Qwen3Moe", "", {**_GROUPED, **_HEADS, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 16}),
    "deepseek3": (
        "DeepseekV3",
        "",
        {
            **_SIZES,
            **_EXPERTS,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
        },
    ),
    "gpt_oss": (
        "GptOss",
        "",
        {
            **_HYBRID,
            **_EXPERTS,
            "head_dim": 8,
            "num_local_experts": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gpt_bigcode": ("GPTBigCode", "", _GPT_SIZES),
}
