"""A small decoder-only language model over bytes whose feed-forward blocks are MoE layers.

Pre-norm blocks: x += attention(norm(x)); x += moe(norm(x)). Rotary positions, RMS normalisation,
output weights tied to the embedding. The MoE layer is a constructor argument, so that Guild's and
the plain PyTorch one train in the very same model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from guild.balancing import move_selection_bias
from guild.train.embedding import Embedding
from guild.train.rotary import rotary_tables, turned_heads
from guild.train.settings import BYTES

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

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, past: Past | None = None
    ) -> torch.Tensor:
        """x (batch, context, hidden); cos, sin as `rotary_tables` makes them.

        With a past, x continues it, and attends to what it holds.
        """
        batch, context, hidden = x.shape
        qkv = self.qkv(x).view(batch, context, 3, self.heads, hidden // self.heads)
        # By token until here, so that no transposed copy is made.
        q, k, v = (t.transpose(1, 2) for t in turned_heads(qkv, cos, sin))
        if past is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k, v = past.with_new(k, v)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=past.visible)
        return self.out(mixed.transpose(1, 2).reshape(batch, context, hidden))


class Past(NamedTuple):
    """What one layer's attention has read so far, and where new tokens go.

    Attributes
    ----------
    keys, values : torch.Tensor
        (batch, heads, context, head size): written to in place.
    positions : torch.Tensor
        int64 (new,): places of the new keys and values.
    visible : torch.Tensor
        bool (new, context): which places each new one attends to.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor

    def with_new(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, the new ones (batch, heads, new, head size) among them."""
        self.keys.index_copy_(2, self.positions, keys.to(self.keys.dtype))
        self.values.index_copy_(2, self.positions, values.to(self.values.dtype))
        return self.keys, self.values


class Block(nn.Module):
    """Attention and MoE, each behind a normalisation and added to the residual stream.

    Attributes
    ----------
    returns_moe_input : bool
        Whether `forward` does, for `imbalance`; compiled, backward then has a gradient of it to
        fill with zeros and to add where nothing else uses it.
    """

    returns_moe_input = True

    def __init__(self, hidden: int, heads: int, moe: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.moe_norm = nn.RMSNorm(hidden)
        self.moe = moe

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, past: Past | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (batch, context, hidden) -> same shape, and what the MoE layer read."""
        x = x + self.attention(self.attention_norm(x), cos, sin, past)
        moe_input = self.moe_norm(x)
        return x + self.moe(moe_input), moe_input if self.returns_moe_input else None

    def imbalance(self, moe_input: torch.Tensor) -> torch.Tensor:
        """Load-balancing loss of the last forward: 1 for a perfectly even load, float32 scalar.

        Experts times the sum over experts of (share of the rows) * (mean router probability),
        Switch Transformer (arXiv 2101.03961) equations 4 to 6. The shares carry no gradient.
        """
        if getattr(self.moe, "balance_sums", None) is not None:  # of the choice before rounding
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
        self.embedding = Embedding(vocabulary, hidden)
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

    def refresh_fp8(self) -> None:
        """Announce that the weights have changed; layers with FP8 codes of them make new ones."""
        for block in self.blocks:
            if hasattr(block.moe, "refresh_fp8"):
                block.moe.refresh_fp8()

    def std_of(self, name: str, weight: torch.Tensor) -> float:
        """Standard deviation of a matrix's initial values."""
        std = weight.shape[-1] ** -0.5  # the embedding's fan-in is that of its tied output
        if name.endswith(("attention.out.weight", "moe.w_down", "moe.shared.w_down")):
            std *= (2 * len(self.blocks)) ** -0.5
        return std

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens int64 (batch, context) -> logits of the bytes (batch, context, 256)."""
        return self._logits(self.hidden_states(tokens)[0])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.embedding.weight[:BYTES])

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

    def continued(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor
    ) -> torch.Tensor:
        """Logits of tokens that follow those in a cache.

        Parameters
        ----------
        tokens : torch.Tensor
            int64 (batch, new).
        positions : torch.Tensor
            int64 (new,): their places in the text. What the cache holds at later places is not
            read.
        cache : torch.Tensor
            (layers, 2, batch, heads, context, head size): keys and values, to which those of the
            new tokens are added. See `make_cache`.

        Returns
        -------
        torch.Tensor
            (batch, new, 256).
        """
        visible = torch.arange(cache.shape[4], device=tokens.device) <= positions[:, None]
        pasts = [Past(keys, values, positions, visible) for keys, values in cache]
        return self._logits(self.hidden_states(tokens, positions, pasts)[0])

    def make_cache(self, batch: int, context: int) -> torch.Tensor:
        """Room for the keys and values of texts of `context` tokens, zeros."""
        weight, kind = self.embedding.weight, self.embedding.weight.device.type
        dtype = weight.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        heads = weight.shape[1] // self.head_size
        size = len(self.blocks), 2, batch, heads, context, self.head_size
        return torch.zeros(size, dtype=dtype, device=weight.device)

    def hidden_states(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        pasts: list[Past] | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """What the output's product reads (batch, context, hidden), and what the MoE layers did."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        cos, sin = rotary_tables(positions, self.head_size, x.dtype)
        moe_inputs = []
        for block, past in zip(self.blocks, pasts or [None] * len(self.blocks), strict=True):
            x, moe_input = block(x, cos, sin, past)
            moe_inputs.append(moe_input)
        return self.norm(x), moe_inputs

    def move_selection_biases(self, rate: float, counts: torch.Tensor) -> None:
        """Move the selection bias of every layer that has one against a load (layers, experts).

        As `guild.MoE.balance`, which knows only the load of the last forward.
        """
        for block, rows in zip(self.blocks, counts, strict=True):
            bias = getattr(block.moe.router, "selection_bias", None)
            if bias is not None:
                move_selection_bias(bias, rows, rate, None)

    def expert_counts(self) -> torch.Tensor:
        """Rows per expert of the last forward: int (layers, experts), on the model's device."""
        return torch.stack([block.moe.expert_counts for block in self.blocks])
