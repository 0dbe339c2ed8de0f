"""Few tokens: a token's output has the same bits in any batch, also under CUDA graphs.

On a GPU, kernels are chosen by the number of tokens. All give the same bits, whether the sort runs
by itself or within the products.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import guild
from guild._torch.operators import ops

EXPERTS, TOP_K, HIDDEN, WIDTH = 12, 3, 136, 72
LAYOUTS = {
    "plain": {},
    "interleaved": {"order": "interleaved"},
    "transposed": {"transposed": True},
    "interleaved, transposed": {"order": "interleaved", "transposed": True},
    "biases": {"bias": True, "order": "interleaved"},
    "no gate": {"activation": "gelu_ungated", "bias": True},
    # Kernels of training are compiled for gpt-oss's activation of interleaved gate and up.
    "gpt_oss": {"activation": "gpt_oss", "order": "interleaved", "bias": True},
    "gpt_oss, transposed": {
        "activation": "gpt_oss",
        "order": "interleaved",
        "transposed": True,
        "bias": True,
    },
    "pair": {"pair": True},
    # With K-major weights, a hidden size divisible by 64 and no biases, SwiGLU has its own kernels.
    "whole stages": {"hidden": 192},
    "whole stages, biases": {"hidden": 192, "bias": True},
    "whole stages, interleaved": {"hidden": 192, "order": "interleaved"},
    "whole stages, clamped": {"hidden": 192, "activation": guild.Activation("silu", limit=0.5)},
    "whole stages, gpt_oss": {"hidden": 192, "activation": "gpt_oss", "bias": True},
    "whole stages, clamped after": {
        "hidden": 192,
        "activation": guild.Activation("silu", limit=0.5, clamp_after=True),
    },
    "whole stages, gelu": {"hidden": 192, "activation": guild.Activation("gelu_tanh", limit=0.5)},
}


class Experts:
    """Random experts in one of LAYOUTS, and tokens for them."""

    def __init__(self, device: str, layout: str, dtype: torch.dtype, tokens: int) -> None:
        options = dict(LAYOUTS[layout])
        torch.manual_seed(3)
        hidden = options.pop("hidden", HIDDEN)
        width = WIDTH if str(options.get("activation")).endswith("_ungated") else 2 * WIDTH

        def draw(*shape: int, scale: float = 1) -> Tensor:
            return (torch.randn(*shape, dtype=torch.float64) * scale).to(device, dtype)

        up, down = draw(EXPERTS, width, hidden, scale=0.1), draw(EXPERTS, hidden, WIDTH, scale=0.1)
        if options.get("transposed"):
            up, down = up.mT.contiguous(), down.mT.contiguous()
        if options.pop("pair", False):
            up = up[:, :WIDTH].clone(), up[:, WIDTH:].clone()
        if options.pop("bias", False):
            options |= {"b_up": draw(EXPERTS, width), "b_down": draw(EXPERTS, hidden)}
        self.weights, self.options = (up, down), options
        self.x = draw(tokens, hidden)
        ids = torch.rand(tokens, EXPERTS).topk(TOP_K).indices
        ids[torch.rand(tokens, TOP_K) < 0.1] = -1
        ids[tokens // 2] = -1  # padding
        self.ids = ids.to(device, torch.int32)
        self.scores = torch.rand(tokens, TOP_K).to(device, torch.float32)

    def __call__(self, which: slice | Tensor = slice(None), ids: Tensor | None = None) -> Tensor:
        ids = self.ids if ids is None else ids
        with torch.no_grad():
            return guild.routed_experts(
                self.x[which], ids[which], self.scores[which], *self.weights, **self.options
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_token_has_the_same_bits_alone_and_in_company(
    layout: str, dtype: torch.dtype, gpu: str
) -> None:
    experts = Experts(gpu, layout, dtype, tokens=2300)  # more than any kernel for few takes
    everyone = experts()
    for tokens in (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 100, 257, 600, 1100):
        for first in (0, 1150 - tokens // 2):
            some = slice(first, first + tokens)
            assert torch.equal(experts(some), everyone[some]), (tokens, first)


@pytest.mark.parametrize("top_k", [1, 2, 5, 8, 9, 16, 17])
@pytest.mark.parametrize("residual", [False, True])
def test_one_token_with_any_number_of_experts(top_k: int, residual: bool, gpu: str) -> None:
    """Some ids twice, some out of range; a kernel of its own serves up to eight."""
    experts = Experts(gpu, "biases", torch.bfloat16, tokens=200)
    experts.ids = torch.randint(-1, EXPERTS, (200, top_k), device=gpu, dtype=torch.int32)
    experts.scores = torch.randn(200, top_k, device=gpu)
    added = torch.randn_like(experts.x) if residual else None
    if residual:
        experts.options["residual"] = added
    everyone = experts()
    for token in range(0, 200, 7):
        one = slice(token, token + 1)
        if added is not None:
            experts.options["residual"] = added[one]
        assert torch.equal(experts(one), everyone[one]), token


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("hidden", [1416, 2048, 2888, 4096, 4240])
@pytest.mark.parametrize(("width", "bias"), [(72, False), (320, False), (1472, True)])
def test_one_token_of_few_experts_on_a_whole_gpu(
    top_k: int, hidden: int, width: int, bias: bool, gpu: str
) -> None:
    """Where the columns are as many as this, tiles of the sum may have a multiprocessor each."""
    torch.manual_seed(hidden + width)
    place = {"device": gpu, "dtype": torch.float16 if bias else torch.bfloat16}
    w_up = torch.randn(EXPERTS, 2 * width, hidden, **place) / hidden**0.5
    w_down = torch.randn(EXPERTS, hidden, width, **place) / width**0.5
    x, residual = torch.randn(100, hidden, **place), torch.randn(100, hidden, **place)
    scores = torch.randn(100, top_k, device=gpu)
    ids = torch.randint(-1, EXPERTS, (100, top_k), device=gpu, dtype=torch.int32)
    ids[10] = -1
    options = {"b_down": torch.randn(EXPERTS, hidden, **place)} if bias else {}
    given = {"w_up": w_up, "w_down": w_down, **options}
    with torch.no_grad():
        everyone = guild.routed_experts(x, ids, scores, **given, residual=residual)
        for first, tokens in ((0, 1), (10, 1), (33, 1), (99, 1), (9, 2), (50, 2), (40, 4)):
            some = slice(first, first + tokens)
            one = guild.routed_experts(
                x[some], ids[some], scores[some], **given, residual=residual[some]
            )
            assert torch.equal(one, everyone[some]), (first, tokens)


@pytest.mark.parametrize(
    ("hidden", "top_k"),
    [(2880, 4), (2888, 3), (2816, 4), (4224, 3), (4096, 2), (2048, 8), (2880, 1)],
)
@pytest.mark.parametrize(("width", "layout"), [(72, "plain"), (328, "gpt_oss"), (1472, "gpt_oss")])
def test_one_token_of_transposed_weights(
    hidden: int, top_k: int, width: int, layout: str, gpu: str
) -> None:
    """With such numbers of columns, clusters of blocks add up a token's experts, two to four."""
    torch.manual_seed(hidden + width)
    place = {"device": gpu, "dtype": torch.float16 if layout == "plain" else torch.bfloat16}
    w_up = torch.randn(EXPERTS, hidden, 2 * width, **place) / hidden**0.5
    w_down = torch.randn(EXPERTS, width, hidden, **place) / width**0.5
    x, residual = torch.randn(100, hidden, **place), torch.randn(100, hidden, **place)
    scores = torch.randn(100, top_k, device=gpu)
    ids = torch.randint(-1, EXPERTS, (100, top_k), device=gpu, dtype=torch.int32)
    ids[10] = -1
    ids[11] = 5  # the same expert for all
    given = {"w_up": w_up, "w_down": w_down, "transposed": True}
    if layout == "gpt_oss":
        given |= {"activation": "gpt_oss", "order": "interleaved"}
        given |= {"b_up": torch.randn(EXPERTS, 2 * width, **place)}
        given |= {"b_down": torch.randn(EXPERTS, hidden, **place)}
    with torch.no_grad():
        for added in (None, residual):
            everyone = guild.routed_experts(x, ids, scores, **given, residual=added)
            for first, tokens in ((0, 1), (10, 1), (11, 1), (12, 1), (99, 1), (9, 2), (50, 4)):
                some = slice(first, first + tokens)
                one = guild.routed_experts(
                    x[some],
                    ids[some],
                    scores[some],
                    **given,
                    residual=None if added is None else added[some],
                )
                assert torch.equal(one, everyone[some]), (first, tokens)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("options", [{}, {"order": "interleaved"}, {"bias": True}], ids=str)
@pytest.mark.parametrize(("hidden", "width"), [(2048, 64), (2048, 2320), (3080, 272), (4160, 1160)])
def test_tiles_that_are_few(
    hidden: int, width: int, options: dict[str, Any], router: str, gpu: str
) -> None:
    """A block of the up projection then has a multiprocessor alone; the bits stay the same."""
    torch.manual_seed(width)
    dtype = torch.float16 if options else torch.bfloat16
    layer = guild.MoE(hidden, width, EXPERTS, 2, router=router, **options, device=gpu, dtype=dtype)
    x = torch.randn(600, hidden, device=gpu, dtype=dtype)
    with torch.no_grad():
        expected = layer(x)
        for tokens in (1, 2, 5, 16, 40, 64):
            assert torch.equal(layer(x[:tokens]), expected[:tokens]), tokens


@pytest.mark.parametrize(("hidden", "top_k"), [(2048, 1), (2048, 3), (2880, 3), (4096, 1)])
def test_one_token_of_few_experts_and_a_shared_one(hidden: int, top_k: int, gpu: str) -> None:
    torch.manual_seed(hidden)
    place = {"device": gpu, "dtype": torch.bfloat16}
    layer = guild.MoE(hidden, 320, EXPERTS, top_k, shared_experts=1, shared_gate=True, **place)
    x = torch.randn(100, hidden, **place)
    with torch.no_grad():
        everyone = layer(x)
        for token in (0, 10, 50, 99):
            assert torch.equal(layer(x[token : token + 1]), everyone[token : token + 1]), token


@pytest.mark.parametrize("top_k", [1, 2, 8, 10])
@pytest.mark.parametrize("width", [72, 320])
def test_a_few_tokens_with_any_number_of_experts(top_k: int, width: int, gpu: str) -> None:
    """The down projection adds up the experts of up to four tokens, if columns are many enough."""
    torch.manual_seed(top_k)
    hidden, dtype = 2048, torch.bfloat16
    w_up = torch.randn(EXPERTS, 2 * width, hidden, device=gpu, dtype=dtype) * 0.1
    w_down = torch.randn(EXPERTS, hidden, width, device=gpu, dtype=dtype) * 0.1
    b_down = torch.randn(EXPERTS, hidden, device=gpu, dtype=dtype)
    x = torch.randn(200, hidden, device=gpu, dtype=dtype)
    scores = torch.randn(200, top_k, device=gpu)
    ids = torch.randint(-1, EXPERTS, (200, top_k), device=gpu, dtype=torch.int32)
    ids[100:110] = 3  # more rows of one expert than a pass has
    ids[150:160] = -1

    def call(some: slice, residual: Tensor | None) -> Tensor:
        added = None if residual is None else residual[some]
        options = {"b_down": b_down, "residual": added}
        return guild.routed_experts(x[some], ids[some], scores[some], w_up, w_down, **options)

    with torch.no_grad():
        for residual in (None, torch.randn_like(x)):
            everyone = call(slice(None), residual)
            for tokens in (2, 3, 4, 5):
                for first in (0, 20, 99, 103, 149, 152, 190):
                    some = slice(first, first + tokens)
                    assert torch.equal(call(some, residual), everyone[some]), (tokens, first)


def test_training_and_inference_have_the_same_bits(gpu: str) -> None:
    moe = guild.MoE(HIDDEN, WIDTH, EXPERTS, TOP_K, device=gpu, dtype=torch.bfloat16)
    x = torch.randn(700, HIDDEN, device=gpu, dtype=torch.bfloat16)
    ids, scores = torch.rand(700, EXPERTS, device=gpu).topk(TOP_K).indices, torch.rand(700, TOP_K)
    scores = scores.to(gpu)
    trained = guild.routed_experts(x, ids, scores, moe.w_up, moe.w_down)
    assert trained.requires_grad
    with torch.no_grad():
        for tokens in (1, 5, 40):
            alone = guild.routed_experts(
                x[:tokens], ids[:tokens], scores[:tokens], moe.w_up, moe.w_down
            )
            assert torch.equal(alone, trained[:tokens])


@pytest.mark.parametrize(
    ("router", "hidden"), [("softmax_renormalized", 576), ("deepseek_v3", 1088), ("softmax", 520)]
)
def test_a_whole_layer_has_the_same_bits_alone_in_company_and_in_training(
    router: str, hidden: int, gpu: str
) -> None:
    """With the router and its product, on the fast path, the slow path and through autograd."""
    torch.manual_seed(4)
    layer = guild.MoE(hidden, WIDTH, 16, TOP_K, router=router, device=gpu, dtype=torch.bfloat16)
    x = torch.randn(4096, hidden, device=gpu, dtype=torch.bfloat16)
    trained = layer(x)
    assert trained.requires_grad
    with torch.no_grad():
        for tokens in (1, 2, 7, 8, 9, 16, 33, 64, 65, 100, 257, 600, 1366, 4096):
            first = (4096 - tokens) // 2
            some = slice(first, first + tokens)
            assert torch.equal(layer(x[some]), trained[some]), tokens
            out, routing = layer(x[some], return_routing=True)
            assert torch.equal(out, trained[some]), tokens
            assert routing.ids.shape == (tokens, TOP_K)


@pytest.mark.parametrize("tokens", [1, 3, 8, 50, 85, 86, 400])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("keep", [False, True])
def test_the_layer_sorts_as_the_sort_does(
    tokens: int, ids_dtype: torch.dtype, keep: bool, device: str
) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    experts = Experts(device, "plain", dtype, tokens)
    ids = experts.ids.to(ids_dtype)
    ids[-1, 0] = EXPERTS + 2**20
    flags = (0, True, 1.0, float("inf"), 0.0, False, False, False, keep)
    up, down = experts.weights
    args = experts.x, ids, experts.scores, None, None, up, None, down, None, None
    _, _, *places = ops.moe_forward(*args, *flags)
    for place, expected in zip(
        places, ops.sort_by_expert(ids, experts.scores, EXPERTS, None), strict=True
    ):
        assert torch.equal(place, expected)


@pytest.mark.parametrize("tokens", [0, 1, 8, 20, 100])
def test_tokens_without_experts(tokens: int, device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    experts = Experts(device, "biases", dtype, max(tokens, 1))
    out = experts(slice(0, tokens), torch.full_like(experts.ids, -1))
    assert out.shape == (tokens, HIDDEN)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize(("tokens", "rounds"), [(1, 10_000), (8, 200), (33, 200)])
def test_graphs_replay_with_any_routing(tokens: int, rounds: int, gpu: str) -> None:
    experts = Experts(gpu, "plain", torch.bfloat16, tokens)
    graph = torch.cuda.CUDAGraph()
    experts()
    with torch.cuda.graph(graph):
        first = experts()
        experts.x, kept = first, experts.x  # a second layer follows the first
        second = experts()
    experts.x = kept
    differ = torch.zeros((), dtype=torch.bool, device=gpu)
    for round_ in range(rounds):
        ids = torch.rand(tokens, EXPERTS, device=gpu).topk(TOP_K).indices.int()
        ids[torch.rand(tokens, TOP_K, device=gpu) < round_ % 3 / 2] = -1
        experts.ids.copy_(ids)
        experts.scores.uniform_()
        graph.replay()
        differ |= (experts() != first).any()
        experts.x = first
        differ |= (experts() != second).any()
        experts.x = kept
    assert first.isfinite().all() and not differ


@pytest.mark.parametrize(("tokens", "rounds"), [(1, 10_000), (5, 200), (33, 200)])
def test_graphs_of_whole_layers_replay_as_they_run(tokens: int, rounds: int, gpu: str) -> None:
    """Two layers: the router with its product, the experts, and shared ones behind a gate."""
    torch.manual_seed(5)
    options = {"shared_experts": 1, "shared_gate": True, "device": gpu, "dtype": torch.bfloat16}
    layers = [guild.MoE(192, WIDTH, EXPERTS, TOP_K, **options).eval() for _ in range(2)]
    x, chosen = torch.randn(tokens, 192, device=gpu, dtype=torch.bfloat16), set()

    def run() -> tuple[Tensor, Tensor]:
        first = layers[0](x)
        return first, layers[1](first)

    differ = torch.zeros((), dtype=torch.bool, device=gpu)
    with torch.no_grad():
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for round_ in range(rounds):
            x.normal_()
            graph.replay()
            for had, wanted in zip(captured, run(), strict=True):
                differ |= (had != wanted).any()
            if round_ % 100 == 0:
                chosen.add(tuple(layers[0](x, return_routing=True)[1].ids.flatten().tolist()))
    assert not differ
    assert captured[1].isfinite().all() and len(chosen) > 1


SHARED = {
    "as wide": {"shared_experts": 1},
    "wider, gate": {"shared_experts": 2, "shared_gate": True},
    "as wide, gate": {"shared_experts": 1, "shared_gate": True, "order": "interleaved"},
    "narrow": {"shared_intermediate": 40, "activation": "gelu_ungated", "bias": True},
    "transposed": {"shared_experts": 1, "shared_gate": True, "transposed": True},
}


@pytest.mark.parametrize("top_k", [1, 2, 8, 9, 12])
@pytest.mark.parametrize("shared", SHARED)
def test_shared_experts_have_the_bits_of_training(shared: str, top_k: int, gpu: str) -> None:
    """Where few tokens take them along as well; a gate is one number a token."""
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(4)
        sizes = {"hidden": HIDDEN, "intermediate": WIDTH, "experts": EXPERTS, "top_k": top_k}
        layer = guild.MoE(**sizes, **SHARED[shared], device=gpu, dtype=dtype)
        x = torch.randn(300, HIDDEN, device=gpu).to(dtype)
        everyone = layer(x)
        for tokens in (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 128, 300):
            with torch.no_grad():
                assert torch.equal(layer(x[:tokens]), everyone[:tokens]), (tokens, dtype)
                assert torch.equal(layer(x[-tokens:]), everyone[-tokens:]), (tokens, dtype)
