#!/usr/bin/env python3
"""python export.py WEIGHTS HF MLX

WEIGHTS holds weights-*.safetensors as train.py writes them. Writes the Hugging Face checkpoint (bf16) to HF and the MLX
4-bit checkpoint to MLX: affine, groups of 64, router gates and shared_expert_gate in 8 bits, made by mlx-lm's own
conversion. The MTP head, which that conversion drops, is added to the MLX file under its Hugging Face names and in that
form (norms hold w, experts.gate_up_proj is one tensor): a matrix holds codes, its scales and biases stand beside it under
the name without `.weight`; mtp.fc and norms stay bf16."""
import argparse
import hashlib
import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm import convert
from safetensors.torch import load_file, save_file

import model as M

DEMO = Path(__file__).parents[2] / "models/demo"
BESIDE = ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]


def config(c):
    ids = {x["content"]: x["id"] for x in json.loads((DEMO / "tokenizer.json").read_text())["added_tokens"]}
    end = ids["<|endoftext|>"]
    return {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "eos_token_id": [ids["<|im_end|>"], end], "image_token_id": ids["<|image_pad|>"],
            "model_type": "qwen3_5_moe", "text_config": c.text_config(end, end), "tie_word_embeddings": False, "transformers_version": "4.57.1",
            "video_token_id": ids["<|video_pad|>"], "vision_end_token_id": ids["<|vision_end|>"], "vision_start_token_id": ids["<|vision_start|>"]}


def write_hf(weights, folder, c):
    folder.mkdir(parents=True)
    state = {k.replace("model.", "model.language_model.", 1) if k.startswith("model.") else k: v for k, v in weights.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(v.nbytes for v in state.values())}, "weight_map": {k: "model.safetensors" for k in sorted(state)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config(c), indent=2) + "\n")
    for name in BESIDE:
        shutil.copyfile(DEMO / name, folder / name)
    return state


def bits_of(path):
    return 8 if path.endswith(("mlp.gate", "shared_expert_gate")) else 4


def mtp_tensors(state):
    out = {}
    for k, v in state.items():
        if not k.startswith("mtp."):
            continue
        w = mx.array(v.float().numpy()).astype(mx.bfloat16)
        if v.dim() == 1 or k == "mtp.fc.weight":
            out[k] = w
            continue
        path = k.removesuffix(".weight")
        out[k], out[path + ".scales"], out[path + ".biases"] = mx.quantize(w, 64, bits_of(path))
    return out


def write_mlx(hf, folder, state):
    mx.set_default_device(mx.cpu)
    convert(str(hf), mlx_path=str(folder), quantize=True, q_group_size=64, q_bits=4)
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    mx.eval(tensors)
    tensors.update(mtp_tensors(state))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    made, given = json.loads((folder / "config.json").read_text()), json.loads((hf / "config.json").read_text())
    quantization = {**made["quantization"]}
    for gate in ("gate", "shared_expert_gate"):
        quantization[f"mtp.layers.0.mlp.{gate}"] = {"group_size": 64, "bits": 8}
    given["quantization"] = given["quantization_config"] = quantization
    for name in folder.iterdir():
        if name.name not in ("model.safetensors",):
            name.unlink()
    (folder / "config.json").write_text(json.dumps(given, indent=2) + "\n")
    for name in BESIDE:
        shutil.copyfile(DEMO / name, folder / name)
    return tensors


def check(state, tensors):
    """Every stored matrix must be what training saw: fake quantisation of the bf16 weights, bit for bit."""
    for k, v in state.items():
        path = k.replace("model.language_model.", "language_model.model.", 1) if k.startswith("model.") else k if k.startswith("mtp.") else "language_model." + k
        names = [path]
        if not k.startswith("mtp.") and k.endswith("experts.gate_up_proj"):
            names = [path.replace("experts.gate_up_proj", f"switch_mlp.{n}_proj.weight") for n in ("gate", "up")]
        elif not k.startswith("mtp.") and k.endswith("experts.down_proj"):
            names = [path.replace("experts.down_proj", "switch_mlp.down_proj.weight")]
        paths = [n.removesuffix(".weight") for n in names]
        if paths[0] + ".scales" not in tensors:
            continue
        bits = bits_of(paths[0])
        got = [np.array(mx.dequantize(tensors[n], tensors[p + ".scales"].astype(mx.float32), tensors[p + ".biases"].astype(mx.float32), 64, bits)) for n, p in zip(names, paths)]
        assert np.array_equal(np.concatenate(got, -2), M.affine_values(v.float(), bits).numpy()), k


def report(folder):
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder}: {size} bytes, model.safetensors SHA-256 {hashlib.sha256((folder / 'model.safetensors').read_bytes()).hexdigest()}")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("weights", type=Path)
    ap.add_argument("hf", type=Path)
    ap.add_argument("mlx", type=Path)
    ap.add_argument("--config", type=json.loads, default={}, help="as given to train.py")
    a = ap.parse_args()
    weights = {}
    for f in sorted(a.weights.glob("weights-*.safetensors")):
        weights.update(load_file(f))
    c = M.Config(**a.config)
    with torch.device("meta"):
        expected = {k: v.shape for k, v in M.Model(c).state_dict().items()}
    assert {k: v.shape for k, v in weights.items()} == expected
    state = write_hf(weights, a.hf, c)
    tensors = write_mlx(a.hf, a.mlx, state)
    check(state, tensors)
    for folder in (a.hf, a.mlx):
        report(folder)


if __name__ == "__main__":
    main()
