"""A tiny Llama with random weights and a real tokenizer, as a Hugging Face folder the whole server can run on.

It is a function of the arguments alone: two processes given the same arguments serve the same model.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = """
The mill stands where the river narrows, and the race carries water to the wheel in every season of the year.
A request arrives with a prompt; the prompt is prefilled in chunks, its keys and values move to another worker,
and tokens stream back one by one until the answer is done. When a worker dies the others go on where it stopped,
and nobody who reads the text can tell that anything has happened at all. What is the capital of France? Paris is
the capital of France. Once upon a time there was a small model that could not say anything sensible, but it said
it quickly, in order, and always in the same words when it was asked the same question with the same seed.
"""


def tiny_llama(
    path: Path,
    *,
    vocab_size: int = 384,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    max_position: int = 2048,
) -> Path:
    """Write the model into the folder `path` (made if missing) and return it.

    Every id below `vocab_size` is a token of the tokenizer. Greedy output wanders over the vocabulary and depends on
    the whole context. It never reaches a special token, so it ends by length unless a test asks for another stop.
    """
    path.mkdir(parents=True, exist_ok=True)
    head_dim, intermediate = hidden // heads, 2 * hidden
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    generation = {"bos_token_id": 1, "eos_token_id": [0, 2]}
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", generation)
    weights = _weights(vocab_size, seed, layers, hidden, intermediate, heads * head_dim, kv_heads * head_dim)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(path, vocab_size=vocab_size, max_position=max_position)
    return path


def write_tokenizer(path: Path, *, vocab_size: int = 384, max_position: int = 2048) -> None:
    """Write a byte-level BPE tokenizer of exactly `vocab_size` tokens with a ChatML template into the folder `path`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size {vocab_size} is out of reach: the corpus gives {tokenizer.get_vocab_size()} tokens"
        )
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(path / "tokenizer_config.json", settings)


def _weights(
    vocab: int, seed: int, layers: int, hidden: int, intermediate: int, q_width: int, kv_width: int
) -> dict[str, Tensor]:
    """Gaussian weights, loud enough in every branch that attention and MLP, not the last token alone, choose."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(gain / columns**0.5)

    tensors = {"model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = torch.ones(hidden)
        tensors[prefix + "self_attn.q_proj.weight"] = matrix(q_width, hidden, 1.5)
        tensors[prefix + "self_attn.k_proj.weight"] = matrix(kv_width, hidden, 1.5)
        tensors[prefix + "self_attn.v_proj.weight"] = matrix(kv_width, hidden, 1.5)
        tensors[prefix + "self_attn.o_proj.weight"] = matrix(hidden, q_width, 1.5)
        tensors[prefix + "post_attention_layernorm.weight"] = torch.ones(hidden)
        tensors[prefix + "mlp.gate_proj.weight"] = matrix(intermediate, hidden, 1.5)
        tensors[prefix + "mlp.up_proj.weight"] = matrix(intermediate, hidden, 1.5)
        tensors[prefix + "mlp.down_proj.weight"] = matrix(hidden, intermediate, 1.5)
    tensors["model.norm.weight"] = torch.ones(hidden)
    head = matrix(vocab, hidden, 3.0)
    head[: len(SPECIAL_TOKENS)] = 0.0  # logit 0: far below the best of the others
    tensors["lm_head.weight"] = head
    return tensors


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
