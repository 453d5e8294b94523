#!/usr/bin/env python3
"""python test_model.py: the training model against transformers, on the CPU in f32: logits, losses and gradients.
Also: documents packed into one row behave as if alone, and the fake quantisation equals MLX's."""
import torch
from transformers import Qwen3_5MoeForCausalLM
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

import model as M

torch.manual_seed(0)
torch.set_num_threads(2)
c = M.Config(vocab=160, hidden=64, layers=4, heads=4, kv_heads=2, head_dim=64, key_dim=32, value_dim=32, experts=8, top_k=3, moe=64, shared=64)
m = M.Model(c)
with torch.no_grad():
    for name, p in m.named_parameters():
        if name.endswith("norm.weight") or "layernorm" in name or "_norm" in name:
            p += 0.2 * torch.randn_like(p)
        if name.endswith("mlp.gate.weight"):
            p *= 20                                           # keep routing decisions clear of rounding
hf = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**{**c.text_config(0, 0), "dtype": "float32"})).eval()
state = {k: v for k, v in m.state_dict().items() if not k.startswith("mtp.")}
hf.load_state_dict(state, strict=True)
hf.config._attn_implementation = "eager"


def close(what, a, b, tol):
    d = ((a - b).norm() / b.norm().clamp_min(1e-12)).item()
    print(f"{what:60s} {d:.1e}")
    assert d < tol, (what, d)


T = 192
tokens = torch.randint(0, c.vocab, (2, T + 2))
ids = torch.zeros_like(tokens)
weight = torch.ones(tokens.shape)
main, n, mtp, n2, balance = m(tokens, ids, weight)
main.backward()
out = hf(tokens[:, :T])
loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), tokens[:, 1:T + 1].flatten(), reduction="sum")
loss.backward()
h, table = m.hidden(tokens[:, :T], M.Documents(ids[:, :T]))
close("logits", m.lm_head(h), out.logits, 1e-5)
close("loss", main, loss, 1e-6)
theirs = dict(hf.named_parameters())
worst = max((((p.grad - theirs[k].grad).norm() / theirs[k].grad.norm().clamp_min(1e-6)).item(), k) for k, p in m.named_parameters() if k in theirs)
print("worst gradient", worst)
assert worst[0] < 1e-4, worst

# two documents in one row, cut at an odd place, against each alone
cut = 77
ids[:, cut:] = 1
packed, _ = m.hidden(tokens[:, :T], M.Documents(ids[:, :T]))
first = hf.model(tokens[:, :cut]).last_hidden_state
second = hf.model(tokens[:, cut:T]).last_hidden_state
close("packed first document", packed[:, :cut], first, 1e-5)
close("packed second document", packed[:, cut:], second, 1e-5)
dd = m.draft_hidden(packed, table, tokens[:, 1:T + 1], M.Documents(ids[:, :T]))
pad = -(T - cut) % 64
alone_tokens = torch.nn.functional.pad(tokens[:, cut:T], (0, pad))
ha, _ = m.hidden(alone_tokens, M.Documents(torch.zeros_like(alone_tokens)))
after = torch.nn.functional.pad(tokens[:, cut + 1:T + 1], (0, pad))
da = m.draft_hidden(ha, table, after, M.Documents(torch.zeros_like(alone_tokens)))
close("packed MTP", dd[:, cut:], da[:, :T - cut], 1e-5)

# the inverse on hard cases: the same key again and again without decay
a = torch.tril(torch.ones(1, 64, 64), -1).requires_grad_()
inv = M.UnitLowerInverse.apply(a)
close("inverse", inv @ (torch.eye(64) + a), torch.eye(64)[None], 1e-6)
a64 = (0.3 * torch.randn(2, 64, 64, dtype=torch.float64)).tril(-1).requires_grad_()
torch.autograd.gradcheck(lambda x: M.UnitLowerInverse.apply(torch.tril(x, -1))[:, 60:, :4], a64, atol=1e-4)

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
mx.set_default_device(mx.cpu)
w = torch.randn(32, 256) * 0.1
for bits in (4, 8):
    q = mx.quantize(mx.array(w.numpy()).astype(mx.bfloat16), 64, bits)
    got = mx.dequantize(*[x.astype(mx.float32) if i else x for i, x in enumerate(q)], 64, bits)
    assert np.array_equal(np.array(got), M.affine_values(w, bits).numpy()), bits
print("quantisation equal to MLX, bit for bit")
