"""How many kernels mlx-lm launches on a Mac for a token of Qwen3.6-35B-A3B, and in how many stages that wait for each other.

Counted in the graph that it builds, which needs no Mac: nodes that compute, and the longest way over them. Widths are small, as
they change no node. What is one kernel on a Mac and several operations elsewhere (embedding, norms, rotation, attention, the
delta rule) is one node here too. Nodes that only change shapes are left out, and so are copies that these may need: it is a
lower bound.

    target/bench-peers/venv/bin/python tools/bench-peers/mlx_kernels.py     (tools/bench-peers/run makes it)
"""

import io
import re

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta, qwen3_5

HIDDEN = 128
SHAPES = {"Broadcast", "Reshape", "ExpandDims", "Squeeze", "Slice", "StopGradient", "Transpose", "Split", "Flatten", "Unflatten", "Contiguous"}


@mx.compile
def scaled(x):
    return x * 2


@mx.compile
def weighted(x, weight):
    return x * weight


@mx.compile
def attended(q, k, v):
    return q * k + v


@mx.compile
def delta_rule(q, k, v, g, beta, state):
    return (q + k + v + g + beta + state).astype(q.dtype)


def gated_delta_update(q, k, v, a, b, a_log, dt_bias, state=None, mask=None, use_kernel=True):
    g, beta = gated_delta.compute_g(a_log, a, dt_bias), mx.sigmoid(b)
    out = delta_rule(q, k, v, g[..., None], beta[..., None], mx.zeros_like(v) if state is None else state)
    return out, out


# A fused function is one node. These are of the right inputs and shapes; their values mean nothing.
mx.fast.rms_norm = lambda x, weight, eps: scaled(x) if weight is None else weighted(x, weight)
mx.fast.rope = lambda x, *_, **__: scaled(x)
mx.dequantize = lambda _, scales, **__: weighted(scales[..., :1], mx.ones(HIDDEN, scales.dtype))
mx.fast.scaled_dot_product_attention = lambda q, k, v, **_: attended(q, k[:, :, :1], v[:, :, :1])
qwen3_5.gated_delta_update = gated_delta_update


def token_graph():
    """The graph of a greedy token behind a prompt, as DOT."""
    config = qwen3_5.TextModelArgs(
        hidden_size=HIDDEN, num_hidden_layers=40, num_attention_heads=2, num_key_value_heads=1, head_dim=64, vocab_size=512,
        linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=64, linear_value_head_dim=64,
        num_experts=16, num_experts_per_tok=8, moe_intermediate_size=64, shared_expert_intermediate_size=64,
    )
    model = qwen3_5.TextModel(config)
    nn.quantize(model, 64, 4)
    model.set_dtype(mx.bfloat16)
    cache = model.make_cache()

    def step(token):
        logits = model(token, cache=cache)[:, -1]
        states = [s for c in cache for s in c.state if isinstance(s, mx.array)]
        return mx.argmax(logits - mx.logsumexp(logits, keepdims=True), -1), states

    token, states = step(mx.array([[1]]))
    mx.eval(model.parameters(), token, states)
    token, states = step(token[None])
    dot = io.StringIO()
    mx.export_to_dot(dot, token, *states)
    return dot.getvalue()


def nodes(dot):
    """Label, inputs and outputs of each node, in the order in which they can run."""
    found = []
    for line in dot.splitlines():
        if made := re.match(r'\{ \d+ \[label ="([^"]*)"', line):
            found.append((made[1], [], []))
        elif edge := re.match(r"(\S+) -> (\S+)$", line):
            array = edge[1].startswith('"')
            found[-1][1 if array else 2].append(edge[1 if array else 2])
    return found


def main():
    kernels, stage = 0, {}
    for label, inputs, outputs in nodes(token_graph()):
        computes = label not in SHAPES
        kernels += computes
        at = max((stage.get(array, 0) for array in inputs), default=0) + computes
        stage.update((array, at) for array in outputs)
    print(f"{kernels} kernels, {max(stage.values())} stages")


if __name__ == "__main__":
    main()
