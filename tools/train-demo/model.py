"""The qwen3_5_moe text model with its MTP head, written for fast training of a small one.

Parameters carry their Hugging Face names. Differences from the transformers implementation are of speed only
(test_model.py compares the two): the delta rule is batched over chunks and only its 128x128 state recurrence is
sequential; every token runs through every expert, unchosen ones weighted zero, which for 16 narrow experts costs less
than sorting; several documents share a row, and neither the recurrent state, the convolution nor attention looks across
their borders. Shapes: B rows, T tokens, H heads, N chunks of C tokens, D head width."""
import contextlib
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

CHUNK = 64
RESET = -30.0          # log of the decay at the first token of a document: e^-30 forgets everything


@dataclass
class Config:
    vocab: int = 8192
    hidden: int = 256
    layers: int = 12
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 256
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 128
    value_dim: int = 128
    experts: int = 16
    top_k: int = 4
    moe: int = 64
    shared: int = 128
    theta: float = 1e7
    eps: float = 1e-6

    def is_attention(self, i):
        return i % 4 == 3

    def text_config(self, bos, eos):
        """The `text_config` of config.json."""
        rot = self.head_dim // 4
        third = math.ceil(rot / 2 / 3)
        return dict(
            attention_bias=False, attention_dropout=0.0, attn_output_gate=True, bos_token_id=bos, dtype="bfloat16", eos_token_id=eos,
            full_attention_interval=4, head_dim=self.head_dim, hidden_act="silu", hidden_size=self.hidden, initializer_range=0.02,
            layer_types=["full_attention" if self.is_attention(i) else "linear_attention" for i in range(self.layers)],
            linear_conv_kernel_dim=4, linear_key_head_dim=self.key_dim, linear_num_key_heads=self.key_heads,
            linear_num_value_heads=self.value_heads, linear_value_head_dim=self.value_dim, mamba_ssm_dtype="float32",
            max_position_embeddings=4096, model_type="qwen3_5_moe_text", moe_intermediate_size=self.moe, mtp_num_hidden_layers=1,
            mtp_use_dedicated_embeddings=False, num_attention_heads=self.heads, num_experts=self.experts, num_experts_per_tok=self.top_k,
            num_hidden_layers=self.layers, num_key_value_heads=self.kv_heads, output_router_logits=False, pad_token_id=None,
            partial_rotary_factor=0.25, rms_norm_eps=self.eps,
            rope_parameters=dict(mrope_interleaved=True, mrope_section=[third, third, rot // 2 - 2 * third], partial_rotary_factor=0.25,
                                 rope_theta=int(self.theta), rope_type="default"),
            router_aux_loss_coef=0.001, shared_expert_intermediate_size=self.shared, tie_word_embeddings=False, use_cache=True,
            vocab_size=self.vocab)


# ------------------------------------------------------------------ 4-bit weights in training
def affine_values(w, bits):
    """What MLX's affine quantisation (groups of 64, bf16 scale and bias) turns a bf16-rounded matrix into, as f32."""
    g = w.bfloat16().float().unflatten(-1, (-1, 64))
    lo, hi = g.amin(-1, keepdim=True), g.amax(-1, keepdim=True)
    top = 2 ** bits - 1
    scale = ((hi - lo) / top).clamp_min(1e-7)
    low = lo.abs() > hi.abs()
    scale = torch.where(low, scale, -scale)
    edge = torch.where(low, lo, hi)
    q0 = torch.round(edge / scale)
    scale = torch.where(q0 != 0, edge / torch.where(q0 != 0, q0, 1.0), scale)
    bias = torch.where(q0 != 0, edge, 0.0)
    codes = torch.round((g - bias) / scale).clamp(0, top)
    return (codes * scale.bfloat16().float() + bias.bfloat16().float()).flatten(-2)


class FakeQuant(torch.autograd.Function):
    """Forward sees the quantised matrix, backward passes the gradient straight through."""

    @staticmethod
    def forward(ctx, w, bits):
        return affine_values_fast(w, bits)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Weight(nn.Module):
    """A matrix that the 4-bit checkpoint stores in `bits` bits (0: stays bf16)."""
    quantise = False                                         # class-wide switch for quantisation-aware training

    def __init__(self, *shape, bits=4, std=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) * (std if std is not None else shape[-1] ** -0.5))
        self.bits = bits

    def get(self, dtype):
        w = self.weight
        if Weight.quantise and self.bits:
            w = FakeQuant.apply(w, self.bits)
        return w.to(dtype)

    def forward(self, x):
        return F.linear(x, self.get(x.dtype))


class Norm(nn.Module):
    """rms1: the weight is centred on zero, statistics in f32."""

    def __init__(self, n, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n))
        self.eps = eps

    def forward(self, x, dtype):
        return norm_fast(x, self.weight, self.eps, dtype)


def rms1(x, w, eps):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + w)


# ------------------------------------------------------------------ gated delta net
class UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower triangular A [..., 64, 64]: 8x8 blocks by their finite power series, then pairs of
    blocks are merged, which keeps every intermediate as tame as the inverse itself."""

    @staticmethod
    def forward(ctx, a):
        shape = a.shape
        a = a.reshape(-1, CHUNK, CHUNK)
        n, s = a.shape[0], 8
        with exact_matmul():
            x = -torch.diagonal(a.view(n, CHUNK // s, s, CHUNK // s, s), dim1=1, dim2=3).permute(0, 3, 1, 2)
            eye = torch.eye(s, device=a.device, dtype=a.dtype)
            x2 = x @ x
            inv = (eye + x) @ (eye + x2) @ (eye + x2 @ x2)
            while s < CHUNK:
                k = CHUNK // (2 * s)
                low = torch.diagonal(a.view(n, k, 2, s, k, 2, s)[:, :, 1, :, :, 0], dim1=1, dim2=3).permute(0, 3, 1, 2)
                first, second = inv.view(n, k, 2, s, s).unbind(2)
                corner = -(second @ (low @ first))
                inv = torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([corner, second], -1)], -2)
                s *= 2
        inv = inv.view(shape)
        ctx.save_for_backward(inv)
        return inv

    @staticmethod
    def backward(ctx, grad):
        inv, = ctx.saved_tensors
        t = inv.transpose(-1, -2)
        with exact_matmul():
            return -torch.tril(t @ (grad @ t), -1)


@contextlib.contextmanager
def exact_matmul():
    """Full f32 products inside, whatever is allowed outside."""
    was = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = was


class StateScan(torch.autograd.Function):
    """S[0] = 0, S[n+1] = M[n] S[n] + X[n] along the first axis; returns all S. M, X: [N, B*H, D, D]."""

    @staticmethod
    def forward(ctx, m, x):
        s = torch.empty_like(x)
        s[0].zero_()
        for n in range(len(m) - 1):
            torch.baddbmm(x[n], m[n], s[n], out=s[n + 1])
        ctx.save_for_backward(m, s)
        return s

    @staticmethod
    def backward(ctx, grad):
        m, s = ctx.saved_tensors
        g = torch.empty_like(grad)                           # g[n]: gradient of S[n+1]
        g[-1].zero_()
        g[-2].copy_(grad[-1])
        for n in range(len(m) - 2, 0, -1):
            torch.baddbmm(grad[n], m[n].transpose(-1, -2), g[n], out=g[n - 1])
        return torch.matmul(g, s.transpose(-1, -2)), g


def conv_and_gates(u, kernel, near, b, a, a_log, dt_bias, start, hk, hv, dk, dv):
    """Convolution inside documents, split into heads, normalised q and k, decay sums; everything [N, B*Hv, C, ...] in f32."""
    B, T, _ = u.shape
    c = u * kernel[:, 3]
    for s in (1, 2, 3):
        c = c + F.pad(u, (0, 0, s, 0))[:, :T] * (kernel[:, 3 - s] * near[..., s - 1:s])
    c = F.silu(c.float())
    q, k, v = c.split([hk * dk, hk * dk, hv * dv], -1)

    def heads(x, h, d):
        x = x.view(B, T // CHUNK, CHUNK, h, d).permute(1, 0, 3, 2, 4)
        return x.repeat_interleave(hv // h, 2).reshape(T // CHUNK, B * hv, CHUNK, d)

    def unit(x, d):
        x = x.unflatten(-1, (-1, d))
        return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).flatten(-2)
    q, k, v = heads(unit(q, dk) * dk ** -0.5, hk, dk), heads(unit(k, dk), hk, dk), heads(v, hv, dv)
    beta = heads(torch.sigmoid(b.float()), hv, 1)
    g = -a_log.float().exp() * F.softplus(a.float() + dt_bias)
    g = heads(torch.where(start[..., None], torch.full_like(g, RESET), g), hv, 1)
    return q, k, v, beta, g


def chunk_pieces(q, k, v, beta, g, kk, qk):
    """From per-chunk products k k^T and q k^T to the operands of the recurrence."""
    sums = g.cumsum(-2)
    i = torch.arange(CHUNK, device=q.device)
    lower = i[:, None] >= i
    decay = torch.where(lower, sums - sums.transpose(-1, -2), float("-inf")).exp()
    a = torch.where(i[:, None] > i, kk * decay * beta, 0.0)
    grown = sums.exp()
    vw = torch.cat([v * beta, k * (beta * grown)], -1)
    last = sums[..., -1:, :]
    return a, qk * decay, vw, q * grown, k * (last - sums).exp(), last.exp()


def recurrence(qg, shrink, puw, kuw, dv):
    """Splits the products with [U | W] into the recurrence S' = M S + X and the readout O = Q S + Y."""
    y, x = puw[..., :dv].contiguous(), kuw[..., :dv].contiguous()
    d = qg.shape[-1]
    eye = torch.eye(d, device=qg.device, dtype=qg.dtype)
    return eye * shrink - kuw[..., dv:], x, qg - puw[..., dv:], y


def gated_norm(o, z, w, eps, B, T, hv, dv):
    """rms norm of each head's output, then the gate; back to [B, T, Hv*Dv]."""
    o = o.view(T // CHUNK, B, hv, CHUNK, dv).permute(1, 0, 3, 2, 4).reshape(B, T, hv, dv)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * w
    return (o * F.silu(z.float().view(B, T, hv, dv))).reshape(B, T, hv * dv).to(z.dtype)


class GatedDeltaNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        kd, vd = c.key_heads * c.key_dim, c.value_heads * c.value_dim
        self.in_proj_qkv = Weight(2 * kd + vd, c.hidden)
        self.in_proj_z = Weight(vd, c.hidden)
        self.in_proj_b = Weight(c.value_heads, c.hidden)
        self.in_proj_a = Weight(c.value_heads, c.hidden, std=0.02)
        self.conv1d = Weight(2 * kd + vd, 1, 4, bits=0, std=0.5)
        self.A_log = nn.Parameter(torch.log(torch.empty(c.value_heads).uniform_(1, 16)))
        dt = torch.exp(torch.empty(c.value_heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(c.value_dim))
        self.out_proj = Weight(c.hidden, vd, std=vd ** -0.5 / math.sqrt(2 * c.layers))

    def forward(self, x, doc):
        c = self.c
        B, T, _ = x.shape
        q, k, v, beta, g = conv_and_gates_fast(
            self.in_proj_qkv(x), self.conv1d.get(x.dtype)[:, 0], doc.near.to(x.dtype), self.in_proj_b(x), self.in_proj_a(x), self.A_log,
            self.dt_bias, doc.start, c.key_heads, c.value_heads, c.key_dim, c.value_dim)
        kt = k.transpose(-1, -2)
        a, p, vw, qg, kd, shrink = chunk_pieces_fast(q, k, v, beta, g, k @ kt, q @ kt)
        uw = UnitLowerInverse.apply(a) @ vw                  # [U | W]
        m, x_, qs, y = recurrence_fast(qg, shrink, p @ uw, kd.transpose(-1, -2) @ uw, c.value_dim)
        s = StateScan.apply(m, x_)
        o = torch.baddbmm(y.flatten(0, 1), qs.flatten(0, 1), s.flatten(0, 1))
        return self.out_proj(gated_norm_fast(o, self.in_proj_z(x), self.norm.weight, c.eps, B, T, c.value_heads, c.value_dim))


# ------------------------------------------------------------------ gated attention
def rope(x, theta, rot):
    """Rotates the first `rot` values of each head; x [B, T, H, D], positions 0.. (only differences matter)."""
    half = rot // 2
    f = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None] * f
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b, rest = x.split([half, half, x.shape[-1] - rot], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def prepare_qk(q, k, qw, kw, eps, theta, dtype):
    rot = q.shape[-1] // 4
    return rope(rms1(q, qw, eps), theta, rot).to(dtype), rope(rms1(k, kw, eps), theta, rot).to(dtype)


def masked_softmax(scores, doc, scale, dtype):
    """scores [B, H*T, T]: causal and inside documents, softmax in f32."""
    B, HT, T = scores.shape
    s = scores.view(B, HT // T, T, T).float() * scale
    i = torch.arange(T, device=scores.device)
    allowed = (i[:, None] >= i) & (doc[:, :, None] == doc[:, None, :])
    s = torch.where(allowed[:, None], s, float("-inf"))
    return s.softmax(-1).to(dtype).view(B, HT, T)


def output_gate(o, gate):
    return o * torch.sigmoid(gate.float()).to(o.dtype)


class GatedAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.q_proj = Weight(c.heads * c.head_dim * 2, c.hidden)
        self.k_proj = Weight(c.kv_heads * c.head_dim, c.hidden)
        self.v_proj = Weight(c.kv_heads * c.head_dim, c.hidden)
        self.o_proj = Weight(c.hidden, c.heads * c.head_dim, std=(c.heads * c.head_dim) ** -0.5 / math.sqrt(2 * c.layers))
        self.q_norm, self.k_norm = Norm(c.head_dim, c.eps), Norm(c.head_dim, c.eps)

    def forward(self, x, doc):
        c = self.c
        B, T, _ = x.shape
        d, kv, r = c.head_dim, c.kv_heads, c.heads // c.kv_heads
        q, gate = self.q_proj(x).view(B, T, c.heads, 2, d).unbind(3)
        k, v = self.k_proj(x).view(B, T, kv, d), self.v_proj(x).view(B, T, kv, d)
        q, k = prepare_qk_fast(q, k, self.q_norm.weight, self.k_norm.weight, c.eps, c.theta, x.dtype)
        q = q.view(B, T, kv, r, d).permute(0, 2, 3, 1, 4).reshape(B * kv, r * T, d)
        k, v = (t.transpose(1, 2).reshape(B * kv, T, d) for t in (k, v))
        p = masked_softmax_fast(q @ k.transpose(-1, -2), doc.ids.repeat_interleave(kv, 0), d ** -0.5, x.dtype)
        o = (p @ v).view(B, kv, r, T, d).permute(0, 3, 1, 2, 4).reshape(B, T, c.heads, d)
        return self.o_proj(output_gate_fast(o, gate).flatten(2))


# ------------------------------------------------------------------ mixture of experts
def route(logits, k):
    """Softmax, the k largest, renormalised; zeros elsewhere. Also the balance loss and the share of each expert."""
    p = logits.float().softmax(-1)
    w, at = p.topk(k, -1)
    w = torch.zeros_like(p).scatter(-1, at, w / w.sum(-1, keepdim=True))
    share = (w > 0).float().mean((0, 1))
    balance = p.shape[-1] / k * (share.detach() * p.mean((0, 1))).sum()
    return w, balance, share.detach()


def expert_hidden(h, w, moe):
    """h [B, T, E*2*moe] holds gate and up of each expert; the expert's weight goes into its hidden values."""
    h = h.unflatten(-1, (-1, 2, moe)).float()
    return (F.silu(h[..., 0, :]) * h[..., 1, :] * w[..., None]).flatten(-2)


def swiglu(g, u):
    return (F.silu(g.float()) * u.float()).to(g.dtype)


class Experts(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(c.experts, 2 * c.moe, c.hidden) * c.hidden ** -0.5)
        self.down_proj = nn.Parameter(torch.randn(c.experts, c.hidden, c.moe) * (c.moe * c.top_k) ** -0.5 / math.sqrt(2 * c.layers) * 2)


def sparse_mix(y, shared, gate):
    return y + shared * torch.sigmoid(gate.float()).to(shared.dtype)


class MoE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.gate = Weight(c.experts, c.hidden, bits=8, std=0.02)
        self.experts = Experts(c)
        self.shared_expert = nn.Module()
        self.shared_expert.gate_proj = Weight(c.shared, c.hidden)
        self.shared_expert.up_proj = Weight(c.shared, c.hidden)
        self.shared_expert.down_proj = Weight(c.hidden, c.shared, std=c.shared ** -0.5 / math.sqrt(2 * c.layers))
        self.shared_expert_gate = Weight(1, c.hidden, bits=8, std=0.02)
        self.balance = self.share = None

    def matrix(self, w, dtype):
        return (FakeQuant.apply(w, 4) if Weight.quantise else w).to(dtype)

    def forward(self, x):
        c = self.c
        w, self.balance, self.share = route_fast(self.gate(x), c.top_k)
        up = self.matrix(self.experts.gate_up_proj, x.dtype).flatten(0, 1)
        down = self.matrix(self.experts.down_proj, x.dtype).permute(0, 2, 1).flatten(0, 1)
        y = expert_hidden_fast(F.linear(x, up), w, c.moe).to(x.dtype) @ down
        s = self.shared_expert
        return sparse_mix_fast(y, s.down_proj(swiglu_fast(s.gate_proj(x), s.up_proj(x))), self.shared_expert_gate(x))


# ------------------------------------------------------------------ the stack
class Documents:
    """Where documents begin in each row of ids: [B, T] of document numbers."""

    def __init__(self, ids):
        self.ids = ids
        before = F.pad(ids, (3, 0), value=-1)
        T = ids.shape[1]
        self.near = torch.stack([before[:, 3 - s:3 - s + T] == ids for s in (1, 2, 3)], -1)
        self.start = ~self.near[..., 0]


class Layer(nn.Module):
    def __init__(self, c, attention):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(c.hidden, c.eps), Norm(c.hidden, c.eps)
        if attention:
            self.self_attn = GatedAttention(c)
        else:
            self.linear_attn = GatedDeltaNet(c)
        self.mlp = MoE(c)

    def forward(self, x, doc, dtype, drop):
        mixer = self.self_attn if hasattr(self, "self_attn") else self.linear_attn
        x = add_fast(x, mixer(self.input_layernorm(x, dtype), doc), drop)
        return add_fast(x, self.mlp(self.post_attention_layernorm(x, dtype)), drop)


def norm(x, w, eps, dtype):
    return rms1(x, w, eps).to(dtype)


def add(x, y, drop):
    return x + (F.dropout(y, drop) if drop else y).float()


def cross_entropy(logits, targets, weight):
    """Sum over tokens of weight * negative log likelihood."""
    logits = logits.float()
    nll = torch.logsumexp(logits, -1) - logits.gather(-1, targets[..., None]).squeeze(-1)
    return (nll * weight).sum()


class Stack(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = Weight(c.vocab, c.hidden, std=0.5)
        self.layers = nn.ModuleList(Layer(c, c.is_attention(i)) for i in range(c.layers))
        self.norm = Norm(c.hidden, c.eps)


class Mtp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc = Weight(c.hidden, 2 * c.hidden, bits=0)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(c.hidden, c.eps), Norm(c.hidden, c.eps)
        self.layers = nn.ModuleList([Layer(c, True)])
        self.norm = Norm(c.hidden, c.eps)


class Model(nn.Module):
    def __init__(self, c, dtype=torch.float32):
        super().__init__()
        self.c, self.dtype, self.drop = c, dtype, 0.0
        self.model = Stack(c)
        self.lm_head = Weight(c.vocab, c.hidden, std=0.02)
        self.mtp = Mtp(c)

    def hidden(self, ids, doc, drop=0.0):
        """Final-normed hidden states [B, T, hidden] and the embedding table in use."""
        table = self.model.embed_tokens.get(torch.float32)
        x = F.embedding(ids, table)
        if drop:
            x = F.dropout(x, drop)
        for layer in self.model.layers:
            x = layer(x, doc, self.dtype, drop)
        return self.model.norm(x, self.dtype), table

    def draft_hidden(self, h, table, after, doc, drop=0.0):
        """MTP: h of position p and token p+1 give the state that predicts token p+2."""
        m = self.mtp
        e = m.pre_fc_norm_embedding(F.embedding(after, table), self.dtype)
        x = m.fc(torch.cat([e, m.pre_fc_norm_hidden(h, self.dtype)], -1)).float()
        return m.norm(m.layers[0](x, doc, self.dtype, drop), self.dtype)

    def forward(self, tokens, ids, weight, drop=0.0):
        """tokens, ids, weight [B, T+2]: text, document numbers and the weight of each token as a target.
        Returns sums of weighted losses (main, mtp), the sums of weights, and the mean balance loss."""
        T = tokens.shape[1] - 2
        doc = Documents(ids[:, :T])
        same1 = (ids[:, 1:T + 1] == ids[:, :T]).float() * weight[:, 1:T + 1]
        same2 = (ids[:, 2:] == ids[:, :T]).float() * weight[:, 2:]
        h, table = self.hidden(tokens[:, :T], doc, drop)
        d = self.draft_hidden(h, table, tokens[:, 1:T + 1], doc, drop)
        head = self.lm_head.get(self.dtype)
        main = cross_entropy_fast(F.linear(h, head), tokens[:, 1:T + 1], same1)
        mtp = cross_entropy_fast(F.linear(d, head), tokens[:, 2:], same2)
        balance = torch.stack([m.balance for m in self.experts()]).mean()
        return main, same1.sum(), mtp, same2.sum(), balance

    def experts(self):
        return [layer.mlp for layer in [*self.model.layers, *self.mtp.layers]]


FUSED = ["affine_values", "conv_and_gates", "chunk_pieces", "recurrence", "gated_norm", "prepare_qk", "masked_softmax", "output_gate", "route", "expert_hidden",
         "swiglu", "sparse_mix", "norm", "add", "cross_entropy"]
for _name in FUSED:                                          # NAME_fast is what the model calls: plain, or compiled
    globals()[_name + "_fast"] = globals()[_name]


def compile_pieces():
    """Fuses the elementwise stretches between matrix products; whole-model compilation takes minutes, this takes seconds."""
    for name in FUSED:
        globals()[name + "_fast"] = torch.compile(globals()[name], dynamic=False)
