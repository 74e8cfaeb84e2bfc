"""One operator or layer at a time, forward and, where it has one, backward: what its kernels take beside its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.plugin.fixture import Gpumem

pytestmark = pytest.mark.filterwarnings("ignore")


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


def positive(side: int) -> torch.Tensor:
    made = torch.randn(side, side)
    return made @ made.T + side * torch.eye(side)


BF16 = torch.bfloat16
OPERATORS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]] = {
    "mm": lambda: (torch.mm, (x(1024, 1024), x(1024, 1024))),
    "mm_bf16": lambda: (torch.mm, (x(4096, 4096, dtype=BF16), x(4096, 4096, dtype=BF16))),
    "mm_tall": lambda: (torch.mm, (x(64, 65_536), x(65_536, 64))),
    "addmm": lambda: (torch.addmm, (x(512), x(512, 512), x(512, 512))),
    "bmm": lambda: (torch.bmm, (x(64, 128, 128), x(64, 128, 128))),
    "einsum": lambda: (lambda a, b: torch.einsum("bhid,bhjd->bhij", a, b), (x(4, 8, 128, 64), x(4, 8, 128, 64))),
    "linear_gelu": lambda: (lambda a, w, b: F.gelu(F.linear(a, w, b)), (x(4096, 512), x(2048, 512), x(2048))),
    "sum_all": lambda: (torch.sum, (x(16_000_000),)),
    "sum_rows": lambda: (lambda a: a.sum(0), (x(100_000, 64),)),
    "mean_columns": lambda: (lambda a: a.mean(-1), (x(64, 100_000),)),
    "norm": lambda: (torch.linalg.vector_norm, (x(16_000_000),)),
    "max": lambda: (lambda a: a.max(), (x(10_000_000),)),
    "argmax": lambda: (lambda a: a.argmax(-1), (x(4096, 32_000),)),
    "std": lambda: (lambda a: a.std(), (x(5_000_000),)),
    "logsumexp": lambda: (lambda a: a.logsumexp(-1), (x(4096, 32_000),)),
    "softmax": lambda: (lambda a: a.softmax(-1), (x(4096, 32_000),)),
    "log_softmax": lambda: (lambda a: a.log_softmax(-1), (x(4096, 4096),)),
    "cumsum": lambda: (lambda a: a.cumsum(0), (x(10_000_000),)),
    "cumsum_rows": lambda: (lambda a: a.cumsum(-1), (x(1024, 4096),)),
    "cumprod": lambda: (lambda a: a.cumprod(-1), (x(1024, 4096),)),
    "logcumsumexp": lambda: (lambda a: a.logcumsumexp(-1), (x(1024, 4096),)),
    "sort": lambda: (lambda a: a.sort()[0], (x(4_000_000),)),
    "sort_rows": lambda: (lambda a: a.sort(-1)[0], (x(4096, 1024),)),
    "sort_wide": lambda: (lambda a: a.sort(-1)[0], (x(64, 65_536),)),
    "argsort_stable": lambda: (lambda a: torch.argsort(a, stable=True), (x(1_000_000),)),
    "topk": lambda: (lambda a: a.topk(50, -1)[0], (x(64, 50_257),)),
    "topk_large": lambda: (lambda a: a.topk(2000, -1)[0], (x(8, 1_000_000),)),
    "kthvalue": lambda: (lambda a: a.kthvalue(10, -1)[0], (x(64, 10_000),)),
    "median": lambda: (lambda a: a.median(), (x(1_000_000),)),
    "quantile": lambda: (lambda a: a.quantile(0.9), (x(1_000_000),)),
    "multinomial": lambda: (lambda a: torch.multinomial(a.softmax(-1), 4), (x(64, 10_000),)),
    "randperm": lambda: (lambda a: torch.randperm(1_000_000, device=a.device), (x(1),)),
    "bincount": lambda: (lambda a: torch.bincount(a, minlength=1000), (torch.randint(1000, (1_000_000,)),)),
    "histc": lambda: (lambda a: torch.histc(a, 100), (x(1_000_000),)),
    "unique": lambda: (torch.unique, (torch.randint(1000, (1_000_000,)),)),
    "nonzero": lambda: (lambda a: torch.nonzero(a > 0), (x(1_000_000),)),
    "masked_select": lambda: (lambda a: torch.masked_select(a, a > 0), (x(1_000_000),)),
    "masked_fill": lambda: (lambda a: a.masked_fill(a > 0, 0.0), (x(4_000_000),)),
    "where": lambda: (lambda a, b: torch.where(a > 0, a, b), (x(4_000_000), x(4_000_000))),
    "index_select": lambda: (lambda a, i: a.index_select(0, i), (x(50_000, 256), torch.randint(50_000, (8192,)))),
    "gather": lambda: (lambda a, i: a.gather(-1, i), (x(4096, 1000), torch.randint(1000, (4096, 1)))),
    "scatter_add": lambda: (
        lambda a, i: torch.zeros(1000, 256, device=a.device).scatter_add(0, i, a),
        (x(10_000, 256), torch.randint(1000, (10_000, 256))),
    ),
    "index_add": lambda: (
        lambda a, i: torch.zeros(1000, 256, device=a.device).index_add(0, i, a),
        (x(10_000, 256), torch.randint(1000, (10_000,))),
    ),
    "index_put": lambda: (
        lambda a, i: torch.zeros(1000, 256, device=a.device).index_put((i,), a, accumulate=True),
        (x(10_000, 256), torch.randint(1000, (10_000,))),
    ),
    "embedding": lambda: (lambda w, i: F.embedding(i, w), (x(50_257, 768), torch.randint(50_257, (8, 1024)))),
    "embedding_bag": lambda: (
        lambda w, i: F.embedding_bag(i, w, mode="sum"),
        (x(50_000, 64), torch.randint(50_000, (1024, 20))),
    ),
    "cross_entropy": lambda: (F.cross_entropy, (x(8192, 50_257), torch.randint(50_257, (8192,)))),
    "cross_entropy_smoothed": lambda: (
        lambda a, y: F.cross_entropy(a, y, label_smoothing=0.1),
        (x(4096, 10_000), torch.randint(10_000, (4096,))),
    ),
    "nll_2d": lambda: (F.cross_entropy, (x(8, 21, 256, 256), torch.randint(21, (8, 256, 256)))),
    "bce": lambda: (
        lambda a: F.binary_cross_entropy_with_logits(a, torch.ones_like(a)),
        (x(1_000_000),),
    ),
    "kl_div": lambda: (
        lambda a, b: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean"),
        (x(4096, 4096), x(4096, 4096)),
    ),
    "cdist": lambda: (torch.cdist, (x(2000, 64), x(2000, 64))),
    "pdist": lambda: (F.pdist, (x(1000, 64),)),
    "layer_norm": lambda: (lambda a, w, b: F.layer_norm(a, (1024,), w, b), (x(8192, 1024), x(1024), x(1024))),
    "rms_norm": lambda: (lambda a, w: F.rms_norm(a, (1024,), w), (x(8192, 1024), x(1024))),
    "group_norm": lambda: (lambda a, w, b: F.group_norm(a, 32, w, b), (x(16, 256, 64, 64), x(256), x(256))),
    "instance_norm": lambda: (F.instance_norm, (x(16, 64, 64, 64),)),
    "batch_norm": lambda: (
        lambda a, w, b: F.batch_norm(a, None, None, w, b, training=True),
        (x(64, 128, 56, 56), x(128), x(128)),
    ),
    "batch_norm_1d": lambda: (
        lambda a, w, b: F.batch_norm(a, None, None, w, b, training=True),
        (x(4096, 512), x(512), x(512)),
    ),
    "dropout": lambda: (lambda a: F.dropout(a, 0.1), (x(8_000_000),)),
    "gelu": lambda: (F.gelu, (x(8_000_000),)),
    "glu": lambda: (F.glu, (x(4096, 2048),)),
    "sdpa_flash": lambda: (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        tuple(x(4, 16, 1024, 64, dtype=BF16) for _ in range(3)),
    ),
    "sdpa_fp32": lambda: (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        tuple(x(4, 16, 1024, 64) for _ in range(3)),
    ),
    "sdpa_mask": lambda: (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        (*(x(4, 16, 512, 64, dtype=BF16) for _ in range(3)), x(4, 1, 512, 512, dtype=BF16)),
    ),
    "sdpa_dropout": lambda: (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
        tuple(x(4, 16, 512, 64, dtype=BF16) for _ in range(3)),
    ),
    "sdpa_grouped": lambda: (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (x(4, 32, 512, 128, dtype=BF16), x(4, 8, 512, 128, dtype=BF16), x(4, 8, 512, 128, dtype=BF16)),
    ),
    "sdpa_wide_head": lambda: (
        F.scaled_dot_product_attention,
        tuple(x(4, 8, 512, 512, dtype=BF16) for _ in range(3)),
    ),
    "sdpa_odd_head": lambda: (
        F.scaled_dot_product_attention,
        tuple(x(4, 8, 512, 72, dtype=BF16) for _ in range(3)),
    ),
    "conv1d": lambda: (lambda a, w: F.conv1d(a, w, padding=1), (x(16, 128, 4096), x(128, 128, 3))),
    "conv2d": lambda: (lambda a, w: F.conv2d(a, w, padding=1), (x(32, 64, 56, 56), x(64, 64, 3, 3))),
    "conv2d_bf16": lambda: (
        lambda a, w: F.conv2d(a, w, padding=1),
        (x(32, 256, 56, 56, dtype=BF16), x(256, 256, 3, 3, dtype=BF16)),
    ),
    "conv2d_1x1": lambda: (F.conv2d, (x(32, 256, 56, 56), x(64, 256, 1, 1))),
    "conv2d_patch": lambda: (lambda a, w: F.conv2d(a, w, stride=16), (x(32, 3, 224, 224), x(768, 3, 16, 16))),
    "conv2d_depthwise": lambda: (
        lambda a, w: F.conv2d(a, w, padding=1, groups=128),
        (x(32, 128, 56, 56), x(128, 1, 3, 3)),
    ),
    "conv2d_dilated": lambda: (
        lambda a, w: F.conv2d(a, w, padding=2, dilation=2),
        (x(8, 128, 64, 64), x(128, 128, 3, 3)),
    ),
    "conv2d_channels_last": lambda: (
        lambda a, w: F.conv2d(a.contiguous(memory_format=torch.channels_last), w, padding=1),
        (x(32, 64, 56, 56, dtype=BF16), x(64, 64, 3, 3, dtype=BF16)),
    ),
    "conv_transpose2d": lambda: (
        lambda a, w: F.conv_transpose2d(a, w, stride=2),
        (x(8, 128, 32, 32), x(128, 64, 2, 2)),
    ),
    "conv3d": lambda: (lambda a, w: F.conv3d(a, w, padding=1), (x(2, 32, 16, 64, 64), x(32, 32, 3, 3, 3))),
    "max_pool2d": lambda: (lambda a: F.max_pool2d(a, 3, 2, 1), (x(32, 64, 112, 112),)),
    "adaptive_avg_pool2d": lambda: (lambda a: F.adaptive_avg_pool2d(a, 7), (x(32, 256, 28, 28),)),
    "interpolate": lambda: (lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), (x(8, 64, 64, 64),)),
    "interpolate_bicubic": lambda: (lambda a: F.interpolate(a, size=(100, 100), mode="bicubic"), (x(8, 16, 64, 64),)),
    "grid_sample": lambda: (
        lambda a, g: F.grid_sample(a, g.tanh(), align_corners=False),
        (x(8, 32, 64, 64), x(8, 64, 64, 2)),
    ),
    "unfold": lambda: (lambda a: F.unfold(a, 3), (x(8, 32, 64, 64),)),
    "pad_reflect": lambda: (lambda a: F.pad(a, (3, 3, 3, 3), mode="reflect"), (x(8, 64, 64, 64),)),
    "cat": lambda: (lambda a, b: torch.cat([a, b]), (x(1_000_000), x(1_000_000))),
    "stack_many": lambda: (lambda a: torch.stack([a + one for one in range(200)]), (x(1000),)),
    "repeat_interleave": lambda: (lambda a: a.repeat_interleave(4, 1), (x(8, 8, 512, 64),)),
    "roll": lambda: (lambda a: a.roll((3, 3), (1, 2)), (x(8, 56, 56, 96),)),
    "flip": lambda: (lambda a: a.flip(-1), (x(1024, 1024),)),
    "tril": lambda: (torch.tril, (x(4096, 4096),)),
    "contiguous": lambda: (lambda a: a.transpose(1, 2).contiguous(), (x(8, 1024, 12, 64),)),
    "to_half_and_back": lambda: (lambda a: a.half().float(), (x(4_000_000),)),
    "complex": lambda: (lambda a: torch.view_as_real(torch.view_as_complex(a) * 2), (x(8, 512, 32, 2),)),
    "foreach_norm": lambda: (
        lambda *a: torch.stack(torch._foreach_norm(a)),  # noqa: SLF001 - that of torch.nn.utils.clip_grad_norm_
        tuple(x(1000, 100) for _ in range(50)),
    ),
    "checkpoint_like": lambda: (lambda a: (a.sin().exp().tanh() + a).sigmoid().sum(), (x(2_000_000),)),
    "fft": lambda: (lambda a: torch.fft.fft(a).abs(), (x(256, 4096),)),
    "rfft2": lambda: (lambda a: torch.fft.rfft2(a).abs(), (x(16, 256, 256),)),
    "stft": lambda: (lambda a: torch.stft(a, 400, 160, return_complex=True).abs(), (x(4, 16_000),)),
    "svd": lambda: (torch.linalg.svdvals, (x(256, 256),)),
    "qr": lambda: (lambda a: torch.linalg.qr(a)[1], (x(256, 256),)),
    "cholesky": lambda: (torch.linalg.cholesky, (positive(256),)),
    "inv": lambda: (torch.linalg.inv, (positive(256),)),
    "solve": lambda: (torch.linalg.solve, (positive(256), x(256, 16))),
    "eigh": lambda: (torch.linalg.eigvalsh, (positive(256),)),
    "matrix_exp": lambda: (torch.linalg.matrix_exp, (x(64, 64) / 64,)),
    "ctc": lambda: (
        lambda a: F.ctc_loss(
            a.log_softmax(-1),
            torch.ones(8, 20, dtype=torch.long, device=a.device),
            torch.full((8,), 100),
            torch.full((8,), 20),
        ),
        (x(100, 8, 32),),
    ),
    "sparse_mm": lambda: (
        lambda i, v, b: torch.sparse.mm(torch.sparse_coo_tensor(i, v, (2000, 2000)), b),
        (torch.randint(2000, (2, 20_000)), x(20_000), x(2000, 64)),
    ),
}
LAYERS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "lstm": lambda: (nn.LSTM(256, 256, 2, batch_first=True), (x(16, 64, 256),)),
    "gru": lambda: (nn.GRU(256, 256, batch_first=True), (x(16, 64, 256),)),
    "rnn": lambda: (nn.RNN(128, 128, batch_first=True), (x(16, 64, 128),)),
    "transformer_encoder": lambda: (nn.TransformerEncoderLayer(512, 8, batch_first=True), (x(8, 256, 512),)),
    "multihead_attention": lambda: (Attention(), (x(8, 256, 512),)),
    "bilinear": lambda: (Bilinear(), (x(256, 64),)),
}
PLACES = ("forward", "trained")


class Attention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(512, 8, batch_first=True)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.attention(given, given, given)[0]


class Bilinear(nn.Module):
    """A bilinear form of one input with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(64, 64, 64)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.bilinear(given, given)


def first(made: Any) -> torch.Tensor:
    return made if isinstance(made, torch.Tensor) else first(made[0])


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("how", PLACES)
def test_operator(gpumem: Gpumem, name: str, how: str) -> None:
    with gpumem.device:
        operator, given = OPERATORS[name]()
    learns = how == "trained"
    given = tuple(one.requires_grad_() if learns and one.is_floating_point() else one for one in given)

    def step() -> None:
        made = first(operator(*given))
        if learns and made.requires_grad:
            torch.autograd.grad(
                made, [one for one in given if one.requires_grad], torch.ones_like(made), allow_unused=True
            )

    gpumem.measure(step)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("how", PLACES)
def test_layer(gpumem: Gpumem, name: str, how: str) -> None:
    with gpumem.device:
        layer, given = LAYERS[name]()

    def step() -> None:
        if how == "trained":
            first(layer(*given)).sum().backward()
            layer.zero_grad()
        else:
            with torch.inference_mode():
                layer(*given)

    gpumem.measure(step)
