"""A GGUF file of random weights with the shapes of a config.json, for llama.cpp's architecture `qwen35moe`.

Names, shapes and metadata are those that llama.cpp's own converter gives this model. What is quantised is what
llama-quantize would quantise (it leaves norms, routers and convolutions in f32); `FORMS` says into what. Blocks hold random codes and
scales of a sensible size, so that activations stay finite and the router spreads its tokens over the experts.
One tensor is in memory at a time.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

ARCH = gguf.MODEL_ARCH.QWEN35MOE

# Type of the matrices and of the output matrix. `q4_0` has 4.5 bits in every matrix, as Lily's weights have
# (llama-quantize without --pure would make the output Q6_K, which is more to read). `q4_k` is less than
# llama-quantize's Q4_K_M, which raises some matrices to Q5_K and Q6_K: it is the faster of the two.
FORMS = {"q4_0": (Type.Q4_0, Type.Q4_0), "q4_k": (Type.Q4_K, Type.Q6_K)}

# What llama-quantize takes when a row does not divide into blocks of 256.
FALLBACK = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}

BLOCKS = {
    Type.Q4_0: np.dtype([("d", "<f2"), ("codes", "u1", 16)]),
    Type.Q5_0: np.dtype([("d", "<f2"), ("codes", "u1", 20)]),
    Type.Q8_0: np.dtype([("d", "<f2"), ("codes", "i1", 32)]),
    Type.Q4_K: np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("codes", "u1", 128)]),
    Type.Q6_K: np.dtype([("codes", "u1", 192), ("scales", "i1", 16), ("d", "<f2")]),
}

# Bits of a code: random codes are spread evenly, with a deviation of 2^bits / sqrt(12) steps.
BITS = {Type.Q4_0: 4, Type.Q5_0: 5, Type.Q8_0: 8, Type.Q4_K: 4, Type.Q6_K: 6}

# The eight 6-bit scales and minima of a Q4_K block, all 32, as its 12 bytes pack them.
SCALE = 32
PACKED_SCALES = [160] * 8 + [0] * 4


def random_blocks(kind: Type, count: int, deviation: float, rng: np.random.Generator) -> np.ndarray:
    """`count` blocks whose weights have mean 0 (half a step beside it, with Q4_0 and its like) and a deviation."""
    size = count * BLOCKS[kind].itemsize
    # Whole words are ten times as fast as `rng.bytes`.
    blocks = rng.integers(0, 2**64, -(-size // 8), np.uint64).view(np.uint8)[:size].view(BLOCKS[kind])
    step = deviation * 12**0.5 / 2 ** BITS[kind]
    step = step * (0.75 + 0.5 * rng.random(count, np.float32))
    if kind in (Type.Q4_K, Type.Q6_K):
        step /= SCALE
        blocks["scales"] = PACKED_SCALES if kind == Type.Q4_K else SCALE
    if kind == Type.Q4_K:
        blocks["dmin"] = 7.5 * step
    blocks["d"] = step
    return blocks


class Tensor:
    """A tensor to be written: its shape in the order of PyTorch, its type, and how its values are drawn."""

    def __init__(self, name, shape, kind, draw):
        self.name, self.shape, self.kind, self.draw = name, shape, kind, draw
        block, size = gguf.GGML_QUANT_SIZES[kind]
        self.nbytes = int(np.prod(shape)) // block * size


def tensors(config: dict, form: str) -> list[Tensor]:
    """All tensors of a model, in the order of the file."""
    c = config["text_config"]
    hidden, experts = c["hidden_size"], c["num_experts"]
    expert_width, shared_width = c["moe_intermediate_size"], c["shared_expert_intermediate_size"]
    heads, kv_heads, head_dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    key_width = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    value_heads, value_dim = c["linear_num_value_heads"], c["linear_value_head_dim"]
    value_width, conv_width = value_heads * value_dim, 2 * key_width + value_heads * value_dim
    matrix_kind, output_kind = FORMS[form]
    found = []

    def matrix(name, *shape, kind=matrix_kind, gain=1.0):
        if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = FALLBACK[kind]
        count = int(np.prod(shape)) // gguf.GGML_QUANT_SIZES[kind][0]
        deviation = gain / shape[-1] ** 0.5
        found.append(Tensor(name + ".weight", shape, kind, lambda rng: random_blocks(kind, count, deviation, rng)))

    def floats(name, *shape, draw):
        found.append(Tensor(name, shape, Type.F32, lambda rng: draw(rng, shape).astype(np.float32)))

    def norm(name, width):
        floats(name + ".weight", width, draw=lambda rng, shape: rng.normal(1.0, 0.1, shape))

    def unquantised(name, *shape, gain):
        floats(name + ".weight", *shape, draw=lambda rng, shape: rng.normal(0, gain / shape[-1] ** 0.5, shape))

    matrix("token_embd", c["vocab_size"], hidden, gain=hidden**0.5)
    norm("output_norm", hidden)
    if not config.get("tie_word_embeddings", False):
        matrix("output", c["vocab_size"], hidden, kind=output_kind, gain=3)
    for i, layer_type in enumerate(c["layer_types"]):
        at = f"blk.{i}."
        norm(at + "attn_norm", hidden)
        norm(at + "post_attention_norm", hidden)
        if layer_type == "linear_attention":
            matrix(at + "attn_qkv", conv_width, hidden)
            matrix(at + "attn_gate", value_width, hidden)
            unquantised(at + "ssm_conv1d", conv_width, c["linear_conv_kernel_dim"], gain=1)
            # Decay: log of it is ssm_a * softplus(x + ssm_dt).
            floats(at + "ssm_dt.bias", value_heads, draw=lambda rng, shape: rng.uniform(-6, -1, shape))
            floats(at + "ssm_a", value_heads, draw=lambda rng, shape: -rng.uniform(0.05, 4, shape))
            matrix(at + "ssm_beta", value_heads, hidden)
            matrix(at + "ssm_alpha", value_heads, hidden, gain=0.7)
            norm(at + "ssm_norm", value_dim)
            matrix(at + "ssm_out", hidden, value_width, gain=0.35)
        else:
            matrix(at + "attn_q", 2 * heads * head_dim, hidden)
            matrix(at + "attn_k", kv_heads * head_dim, hidden)
            matrix(at + "attn_v", kv_heads * head_dim, hidden)
            norm(at + "attn_q_norm", head_dim)
            norm(at + "attn_k_norm", head_dim)
            matrix(at + "attn_output", hidden, heads * head_dim, gain=0.35)
        unquantised(at + "ffn_gate_inp", experts, hidden, gain=2)
        unquantised(at + "ffn_gate_inp_shexp", hidden, gain=1.5)
        matrix(at + "ffn_gate_exps", experts, expert_width, hidden)
        matrix(at + "ffn_up_exps", experts, expert_width, hidden)
        matrix(at + "ffn_down_exps", experts, hidden, expert_width, gain=0.35)
        matrix(at + "ffn_gate_shexp", shared_width, hidden)
        matrix(at + "ffn_up_shexp", shared_width, hidden)
        matrix(at + "ffn_down_shexp", hidden, shared_width, gain=0.35)
    return found


def add_metadata(writer: gguf.GGUFWriter, config: dict) -> None:
    """The hyperparameters. There is no vocabulary: llama-bench needs none."""
    c = config["text_config"]
    rope = c["rope_parameters"]
    writer.add_name("random")
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_vocab_size(c["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(c["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_expert_count(c["num_experts"])
    writer.add_expert_used_count(c["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    writer.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(c["linear_key_head_dim"])
    writer.add_ssm_group_count(c["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(c["linear_num_value_heads"])
    writer.add_ssm_inner_size(c["linear_num_value_heads"] * c["linear_value_head_dim"])
    interval = c["full_attention_interval"]
    for i, kind in enumerate(c["layer_types"]):
        if (kind == "full_attention") != ((i + 1) % interval == 0):
            raise ValueError(f"layer {i} is {kind}: llama.cpp expects full attention in every {interval}th layer")
    writer.add_full_attention_interval(interval)


def write(config: dict, form: str, path: Path, seed: int = 1) -> int:
    """Writes the file; it appears under its name when it is whole. Returns the bytes of its tensors."""
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[ARCH])
    add_metadata(writer, config)
    plan = tensors(config, form)
    for t in plan:
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.nbytes, raw_dtype=t.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.Generator(np.random.SFC64(seed))
    for t in plan:
        writer.write_tensor_data(t.draw(rng))
    writer.close()
    partial.rename(path)
    return sum(t.nbytes for t in plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="config.json with the shapes")
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    print(f"{write(json.loads(args.config.read_text()), args.form, args.out)} bytes of tensors")


if __name__ == "__main__":
    main()
