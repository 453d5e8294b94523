"""Muon for the matrices, AdamW for everything else, batched over parameters of one shape."""
import torch


def newton_schulz(g, steps=5):
    """About the nearest orthogonal matrix to each of g [n, rows, cols]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return (x.mT if tall else x).float()


class Optimizer:
    """Learning rates are per step: `lr` for Muon (the update's root mean square is 0.2 lr) and `adam` for AdamW."""

    def __init__(self, model, decay, momentum=0.95, betas=(0.9, 0.95)):
        self.decay, self.momentum, self.betas, self.t = decay, momentum, betas, 0
        hidden = model.c.hidden
        self.muon, plain = {}, []
        for name, p in model.named_parameters():
            matrix = p.dim() >= 2 and not any(x in name for x in ("embed_tokens", "lm_head", "conv1d", "mlp.gate.", "shared_expert_gate", "in_proj_a", "in_proj_b"))
            if not matrix:
                plain.append(p)
                continue
            r, c = p.shape[-2:]
            # Projections out of the stream hold several heads: square blocks, each made orthogonal by itself.
            block = (hidden, c) if c == hidden and r > c and r % c == 0 else (r, c)
            self.muon.setdefault(block, []).append(p)
        self.bufs = {k: torch.zeros(sum(p.numel() for p in ps) // (k[0] * k[1]), *k, device=ps[0].device) for k, ps in self.muon.items()}
        self.plain = plain
        self.decays = [p for p in plain if p.dim() >= 2 and p.shape[-1] >= 64]
        self.m = [torch.zeros_like(p) for p in plain]
        self.v = [torch.zeros_like(p) for p in plain]

    @torch.no_grad()
    def step(self, lr, adam):
        self.t += 1
        for block, params in self.muon.items():
            g = torch.cat([p.grad.reshape(-1, *block) for p in params])
            buf = self.bufs[block]
            buf.lerp_(g, 1 - self.momentum)
            u = newton_schulz(g.lerp(buf, self.momentum)) * (0.2 * max(block) ** 0.5)
            parts = [x.reshape(p.shape) for x, p in zip(u.split([p.numel() // (block[0] * block[1]) for p in params]), params)]
            torch._foreach_mul_(params, 1 - lr * self.decay)
            torch._foreach_add_(params, parts, alpha=-lr)
        b1, b2 = self.betas
        grads = [p.grad for p in self.plain]
        torch._foreach_lerp_(self.m, grads, 1 - b1)
        torch._foreach_mul_(self.v, b2)
        torch._foreach_addcmul_(self.v, grads, grads, 1 - b2)
        size = torch._foreach_sqrt(torch._foreach_div(self.v, 1 - b2 ** self.t))
        torch._foreach_add_(size, 1e-10)
        torch._foreach_mul_(self.decays, 1 - adam * self.decay)
        torch._foreach_addcdiv_(self.plain, self.m, size, -adam / (1 - b1 ** self.t))

    def state(self):
        return {"t": self.t, "bufs": self.bufs, "m": self.m, "v": self.v}

    def load(self, s):
        self.t = s["t"]
        for k, b in self.bufs.items():
            b.copy_(s["bufs"][k])
        for mine, theirs in ((self.m, s["m"]), (self.v, s["v"])):
            for x, y in zip(mine, theirs):
                x.copy_(y)
