"""Arguments that are wrong, odd or empty; forks, threads and interpreters: an error that says what,
never a crash.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from arb_ternary.backends import reference
from arb_ternary.backends.protocol import WeightShape
from arb_ternary_cpu.backend import build

SHAPE = WeightShape(20, 70, 32)


@pytest.fixture(scope="module")
def kernels() -> Any:
    return build().kernels


def weight(kernels: Any, shape: WeightShape = SHAPE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    trits = torch.randint(-1, 2, (shape.out_features, shape.in_features), generator=generator).to(
        torch.int8
    )
    exponent = torch.randint(-5, 0, (shape.out_features, shape.groups), generator=generator).to(
        torch.int8
    )
    return kernels["pack"](trits), exponent


def test_offset_and_strided_operands_give_the_same_bits(kernels: Any) -> None:
    packed, exponent = weight(kernels)
    q, scale = kernels["quantize_rows"](torch.randn(9, 70))
    tail = (exponent, None, SHAPE, torch.float32)
    wanted = kernels["linear"](q, scale, packed, *tail)

    def offset(tensor: Tensor, by: int) -> Tensor:
        room = torch.zeros(tensor.numel() + by, dtype=tensor.dtype)
        return room[by:].view(tensor.shape).copy_(tensor)

    assert torch.equal(
        kernels["linear"](offset(q, 3), offset(scale, 1), offset(packed, 7), *tail), wanted
    )
    strided = torch.zeros((18, 140), dtype=torch.int8)[::2, ::2].copy_(q)
    assert torch.equal(
        kernels["linear"](strided, scale.repeat_interleave(2)[::2], packed, *tail), wanted
    )
    spread = torch.zeros((20, 2 * SHAPE.groups), dtype=torch.int8)[:, ::2].copy_(exponent)
    assert torch.equal(kernels["linear"](q, scale, packed, spread, *tail[1:]), wanted)
    assert torch.equal(
        kernels["quantize_rows"](torch.ones(1).expand(4, 70))[0],
        torch.full((4, 70), 127).to(torch.int8),
    )


@pytest.mark.parametrize("sizes", [(0, 5, 7), (3, 0, 7), (3, 5, 0), (0, 0, 0)])
def test_nothing_to_do_gives_zeros_of_the_right_shape(
    kernels: Any, sizes: tuple[int, int, int]
) -> None:
    rows, out_features, columns = sizes
    shape = WeightShape(out_features, columns, 32)
    packed, exponent = weight(kernels, shape)
    bias = torch.ones(out_features)
    tail = (packed, exponent, bias, shape, torch.float32)
    y = kernels["linear"](torch.zeros((rows, columns), dtype=torch.int8), torch.ones(rows), *tail)
    assert torch.equal(y, torch.ones((rows, out_features)))
    assert torch.equal(
        kernels["linear"](torch.zeros((rows, columns)), None, *tail),
        torch.ones((rows, out_features)),
    )
    tail = (packed, exponent, shape, torch.float32)
    for grad, scale in (
        (torch.zeros((rows, out_features)), None),
        (torch.zeros((rows, out_features)).char(), 1.0),
    ):
        unit = None if scale is None else torch.tensor(scale)
        assert torch.equal(
            kernels["linear_grad_input"](grad, unit, *tail), torch.zeros((rows, columns))
        )
    ids = torch.zeros(0, dtype=torch.int64)
    assert kernels["embedding"](ids, *tail).shape == (0, columns)
    assert kernels["rms_norm_quantize"](torch.zeros((rows, columns)), 1e-6)[0].shape == (
        rows,
        columns,
    )
    assert kernels["quantize_gradient"](torch.zeros((rows, columns)), 1, 2, 3)[1].item() == 1.0


WRONG: dict[str, tuple[type[Exception], str, Callable[[dict[str, Any]], None]]] = {
    "x of another width": (
        ValueError,
        r"x must be \[M, 70\]",
        lambda a: a.update(x=a["x"][:, :69]),
    ),
    "x with one dimension": (
        ValueError,
        "x must have 2 dimensions",
        lambda a: a.update(x=a["x"][0]),
    ),
    "x of another dtype": (
        TypeError,
        "x must be torch.int8",
        lambda a: a.update(x=a["x"].to(torch.int16)),
    ),
    "x on another device": (
        TypeError,
        "x must be a dense tensor on the CPU",
        lambda a: a.update(x=a["x"].to("meta")),
    ),
    "x that is sparse": (
        TypeError,
        "x must be a dense tensor",
        lambda a: a.update(x=a["x"].float().to_sparse().char()),
    ),
    "a scale too few": (
        ValueError,
        r"scale must be \[9\]",
        lambda a: a.update(scale=a["scale"][:8]),
    ),
    "a scale of float64": (
        TypeError,
        "scale must be torch.float32",
        lambda a: a.update(scale=a["scale"].double()),
    ),
    "another layout": (
        ValueError,
        "packed must be",
        lambda a: a.update(packed=a["packed"].flatten()),
    ),
    "a weight too small": (
        ValueError,
        "packed must be",
        lambda a: a.update(packed=a["packed"][:1]),
    ),
    "a weight of int8": (
        TypeError,
        "packed must be torch.uint8",
        lambda a: a.update(packed=a["packed"].char()),
    ),
    "exponents too few": (
        ValueError,
        r"exponent must be \[20, 3\]",
        lambda a: a.update(exponent=a["exponent"][:, :2]),
    ),
    "exponents of int32": (
        TypeError,
        "exponent must be",
        lambda a: a.update(exponent=a["exponent"].int()),
    ),
    "a bias too long": (
        ValueError,
        r"bias must be \[20\]",
        lambda a: a.update(bias=torch.ones(21)),
    ),
    "an integer result": (
        TypeError,
        "dtype: the cpu backend serves",
        lambda a: a.update(dtype=torch.int32),
    ),
    "groups that cut blocks": (
        ValueError,
        "multiple of 16",
        lambda a: a.update(shape=WeightShape(20, 70, 24)),
    ),
    "a negative size": (
        ValueError,
        "must not be negative",
        lambda a: a.update(shape=WeightShape(-20, 70, 32)),
    ),
    "more rows than memory": (
        ValueError,
        "packed must be",
        lambda a: a.update(shape=WeightShape(1 << 40, 70, 32), x=a["x"]),
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_argument_is_named(kernels: Any, fault: str) -> None:
    kind, message, change = WRONG[fault]
    packed, exponent = weight(kernels)
    q, scale = kernels["quantize_rows"](torch.randn(9, 70))
    arguments = {
        "x": q,
        "scale": scale,
        "packed": packed,
        "exponent": exponent,
        "bias": None,
        "shape": SHAPE,
    }
    arguments["dtype"] = torch.float32
    change(arguments)
    with pytest.raises(kind, match=message):
        kernels["linear"](*arguments.values())


def test_values_that_are_no_trits_are_refused(kernels: Any) -> None:
    for value in (2, -2, 3, 127, -128):
        with pytest.raises(ValueError, match="trits must be -1, 0 or 1"):
            kernels["pack"](torch.tensor([[0, value]], dtype=torch.int8))


def test_an_id_outside_the_table_is_an_index_error(kernels: Any) -> None:
    packed, exponent = weight(kernels)
    for bad in (-1, 20, 2**62, -(2**62)):
        with pytest.raises(IndexError, match=f"ids must lie in 0..19, got {bad} at place 1"):
            kernels["embedding"](torch.tensor([0, bad]), packed, exponent, SHAPE, torch.float32)


def test_codes_that_no_trit_has_do_no_harm(kernels: Any) -> None:
    """A corrupted weight (code 3) gives numbers, not a crash."""
    packed, exponent = weight(kernels)
    packed.fill_(255)
    q, scale = kernels["quantize_rows"](torch.randn(9, 70))
    assert kernels["linear"](q, scale, packed, exponent, None, SHAPE, torch.float32).shape == (
        9,
        20,
    )
    assert kernels["linear_grad_input"](
        torch.randn(9, 20), None, packed, exponent, SHAPE, torch.float32
    ).shape == (
        9,
        70,
    )


def test_exponents_of_every_value_do_no_harm(kernels: Any) -> None:
    packed, exponent = weight(kernels)
    q, scale = kernels["quantize_rows"](torch.randn(9, 70))
    for value in (-128, -127, -126, 127):
        exponent.fill_(value)
        y = kernels["linear"](q, scale, packed, exponent, None, SHAPE, torch.float32)
        trits = reference.pack(kernels["unpack"](packed, SHAPE))
        wanted = reference.linear(q, scale, trits, exponent, None, SHAPE, torch.float32)
        assert torch.equal(y.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))


def _large_product(kernels: Any) -> Callable[[], Tensor]:
    shape = WeightShape(512, 1024, 128)
    packed, exponent = weight(kernels, shape)
    q, scale = kernels["quantize_rows"](torch.randn(300, 1024))
    return lambda: kernels["linear"](q, scale, packed, exponent, None, shape, torch.float32)


def test_a_forked_child_computes_with_threads_of_its_own(kernels: Any) -> None:
    torch.set_num_threads(2)
    product = _large_product(kernels)
    wanted = product().numpy().tobytes()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            # Compared without torch, whose OpenMP threads do not survive a fork.
            os.write(writer, b"same" if product().numpy().tobytes() == wanted else b"else")
        finally:
            os._exit(0)
    os.close(writer)
    answer = os.read(reader, 4)
    os.close(reader)
    assert os.waitpid(child, 0)[1] == 0
    assert answer == b"same"
    assert product().numpy().tobytes() == wanted
    torch.set_num_threads(1)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
@pytest.mark.skipif(
    "OpenMP" not in torch.__config__.parallel_info(), reason="torch has threads of another kind"
)
def test_torch_and_the_kernels_share_their_threads() -> None:
    program = """
import os, torch
from arb_ternary.backends.protocol import WeightShape
from arb_ternary_cpu.backend import build
torch.set_num_threads(2)
kernels = build().kernels
shape = WeightShape(512, 1024, 128)
packed = kernels["pack"](torch.ones(512, 1024, dtype=torch.int8))
(torch.rand(1 << 22) + 1).sum()
before = len(os.listdir("/proc/self/task"))
q, scale = kernels["quantize_rows"](torch.ones(300, 1024))
kernels["linear"](q, scale, packed, torch.zeros(512, 8, dtype=torch.int8), None, shape,
    torch.float32)
print(before, len(os.listdir("/proc/self/task")))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    before, after = map(int, run.stdout.split())
    assert after == before


def test_calls_from_several_threads_at_once_give_the_same_bits(kernels: Any) -> None:
    torch.set_num_threads(2)
    product = _large_product(kernels)
    wanted = product()
    faults: list[int] = []

    def repeat(index: int) -> None:
        faults.extend(index for _ in range(20) if not torch.equal(product(), wanted))

    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(1)
    assert not faults


def test_another_interpreter_of_the_process_may_import_it() -> None:
    program = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
import arb_ternary_cpu._native
run = getattr(interpreters, "exec", None) or interpreters.run_string
print("error:", run(interpreters.create(),
    "try:\\n import arb_ternary_cpu._native\\nexcept ImportError: pass"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "error: None"


def test_more_threads_than_work_or_processors_change_nothing(kernels: Any) -> None:
    product = _large_product(kernels)
    wanted = product()
    torch.set_num_threads(13)
    assert torch.equal(product(), wanted)
    torch.set_num_threads(1)
