"""A small decoder-only language model over bytes whose feed-forward blocks are MoE layers.

Pre-norm blocks: x += attention(norm(x)); x += moe(norm(x)). Rotary positions, RMS normalisation,
output weights tied to the embedding. The MoE layer is a constructor argument, so that Guild's and
the plain PyTorch one train in the very same model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

BYTES = 256
_ROTARY_BASE = 10_000.0

MoEFactory = Callable[[int, int, int, int], nn.Module]


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        if hidden % heads or (hidden // heads) % 2:
            raise ValueError(
                f"heads: expected a divisor of hidden {hidden} that leaves an even head size, "
                f"got {heads}"
            )
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x (batch, context, hidden); cos, sin (context, head size / 2)."""
        batch, context, hidden = x.shape
        qkv = self.qkv(x).view(batch, context, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.transpose(1, 3).unbind(2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, context, hidden))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (j, j + half) of the last dimension by the angle of their position."""
    a, b = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rotary_angles(context: int, head_size: int, device: torch.device) -> torch.Tensor:
    """Angles float32 (context, head_size / 2): position times a geometric series of rates."""
    rates = torch.arange(head_size // 2, device=device) * (-2.0 / head_size)
    return torch.arange(context, device=device)[:, None] * _ROTARY_BASE**rates


class Block(nn.Module):
    """Attention and MoE, each behind a normalisation and added to the residual stream."""

    def __init__(self, hidden: int, heads: int, moe: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.moe_norm = nn.RMSNorm(hidden)
        self.moe = moe

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x (batch, context, hidden) -> same shape, and what the MoE layer read."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        moe_input = self.moe_norm(x)
        return x + self.moe(moe_input), moe_input

    def imbalance(self, moe_input: torch.Tensor) -> torch.Tensor:
        """Load-balancing loss of the last forward: 1 for a perfectly even load, float32 scalar.

        Experts times the sum over experts of (share of the rows) * (mean router probability),
        Switch Transformer (arXiv 2101.03961) equations 4 to 6. The shares carry no gradient.
        """
        if getattr(self.moe, "balance_sums", None) is not None:  # of the choices before rounding
            return self.moe.load_balancing_loss
        probability = self.moe.router(moe_input).float().softmax(-1)
        counts = self.moe.expert_counts.float()
        return counts.numel() * (counts / counts.sum() * probability.flatten(0, -2).mean(0)).sum()


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out.

    Parameters
    ----------
    hidden, layers, heads, intermediate, experts, top_k : int
        Sizes; `intermediate` is the width of one expert.
    make_moe : callable
        `(hidden, intermediate, experts, top_k) -> nn.Module`, called once a layer.
    vocabulary : int
        Rows of the embedding and of the output's product. Those past the bytes are there to give
        the products the size that they have in models of words.
    """

    def __init__(
        self,
        hidden: int,
        layers: int,
        heads: int,
        intermediate: int,
        experts: int,
        top_k: int,
        make_moe: MoEFactory,
        vocabulary: int = BYTES,
    ) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(
            Block(hidden, heads, make_moe(hidden, intermediate, experts, top_k))
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(hidden)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill every weight from `seed` on the CPU: normal, variance 1 / fan-in.

        The order is that of the parameter names, so it depends neither on the device nor on which
        MoE layer is used. Matrices that write into the residual stream are scaled down by
        sqrt(2 * layers) to keep its variance from growing with depth.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, weight in sorted(self.named_parameters()):
            if weight.dim() == 1:  # the normalisation's gains
                weight.fill_(1.0)
                continue
            weight.copy_(torch.randn(weight.shape, generator=generator) * self.std_of(name, weight))

    def std_of(self, name: str, weight: torch.Tensor) -> float:
        """Standard deviation of a matrix's first values."""
        std = weight.shape[-1] ** -0.5  # the embedding's fan-in is that of its tied output
        if name.endswith(("attention.out.weight", "moe.w_down", "moe.shared.w_down")):
            std *= (2 * len(self.blocks)) ** -0.5
        return std

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens int64 (batch, context) -> logits of the bytes (batch, context, 256)."""
        return F.linear(self.hidden_states(tokens)[0], self.embedding.weight[:BYTES])

    def loss(
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy in nats per byte and mean imbalance of the layers, float32 scalars."""
        hidden, moe_inputs = self.hidden_states(tokens)
        logits = F.linear(hidden, self.embedding.weight)
        imbalance = torch.stack(
            [block.imbalance(x) for block, x in zip(self.blocks, moe_inputs, strict=True)]
        )
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), imbalance.mean()

    def hidden_states(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What the output's product reads (batch, context, hidden), and what the MoE layers did."""
        angles = rotary_angles(tokens.shape[1], self.head_size, tokens.device)
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding(tokens)
        moe_inputs = []
        for block in self.blocks:
            x, moe_input = block(x, cos, sin)
            moe_inputs.append(moe_input)
        return self.norm(x), moe_inputs

    def move_selection_biases(self, rate: float) -> None:
        """`MoE.balance` of every layer whose router has a selection bias."""
        for block in self.blocks:
            if hasattr(block.moe.router, "selection_bias"):
                block.moe.balance(rate)

    def expert_counts(self) -> torch.Tensor:
        """Rows per expert of the last forward: int (layers, experts), on the model's device."""
        return torch.stack([block.moe.expert_counts for block in self.blocks])


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: bytes,
    count: int,
    context: int,
    seed: int,
    temperature: float = 0.6,
) -> bytes:
    """Continue `prompt` by `count` sampled bytes, looking back at most `context` bytes.

    Every forward sees `context` bytes, zeros behind the text: what comes later does not change what
    is read, and one shape is compiled once.
    """
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        seen = text[-context:]
        window = torch.tensor([seen + [0] * (context - len(seen))], device=device)
        logits = model(window)[0, len(seen) - 1].float().cpu() / temperature
        text.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    return bytes(text)
