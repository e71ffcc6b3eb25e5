"""The C++ kernel, the op-by-op form and torch.optim give the same bits."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.runtime.arithmetic import AdamScalars, fma, square_root
from hytrain_fx.runtime.native import build
from hytrain_fx.runtime.scalars import ScalarsStruct, UpdateFlag

from .adamw_operands import GROUP, KINDS, VARIANTS, Operands, assert_same_bits, different_bits, kernel_, op_by_op_, operands

needs_torch_fma = pytest.mark.skipif(
    platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch's kernels for CPUs without AVX2 have no fused multiply-add",
)


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
FACTORS = st.lists(st.sampled_from([0.0, 1.0 / 65536, 0.3, 1.0, 7.7, float("inf")]), max_size=4).map(tuple)


@st.composite
def any_scalars(draw: st.DrawFn) -> AdamScalars:
    group = {
        "lr": draw(st.sampled_from([0.0, 1e-5, 1e-3, 0.3])),
        "betas": (draw(st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.95])), draw(st.sampled_from([0.0, 0.5, 0.95, 0.999]))),
        "eps": draw(st.sampled_from([0.0, 1e-16, 1e-8, 1e-3])),
        "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.5])),
        "amsgrad": draw(st.booleans()),
        "maximize": draw(st.booleans()),
    }
    decoupled, torch_cuda, step, factors = draw(st.booleans()), draw(st.booleans()), draw(st.integers(1, 20_000)), draw(FACTORS)
    scalars = AdamScalars.of(group, step, decoupled=decoupled, torch_cuda=torch_cuda, factors=factors)
    return replace(scalars, flags=scalars.flags | (UpdateFlag.WIDE_FACTORS if draw(st.booleans()) else 0))


@settings(deadline=None, max_examples=150)
@given(any_scalars(), st.integers(0, 200), st.integers(0, 1 << 40), st.sampled_from(KINDS), DTYPES, st.none() | DTYPES)
def test_kernel_is_op_by_op(
    scalars: AdamScalars, n: int, seed: int, kind: str, grad_dtype: torch.dtype, out_dtype: torch.dtype | None
) -> None:
    """The C++ kernel gives the op-by-op form's bits, for every option, dtype, form and length."""
    by_kernel = operands(n, seed, kind, grad_dtype, out_dtype)
    by_ops = by_kernel.clone()
    kernel_(by_kernel, scalars)
    op_by_op_(by_ops, scalars)
    assert_same_bits(by_kernel, by_ops)


def torch_step(o: Operands, group: dict[str, Any], step: int, *, decoupled: bool, fused: bool = False) -> None:
    """One step of torch.optim, foreach=False, from and into `o`."""
    parameter = torch.nn.Parameter(o.master)
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)([parameter], foreach=False, fused=fused, **group)
    state: dict[str, Any] = {"step": torch.tensor(float(step - 1)), "exp_avg": o.m, "exp_avg_sq": o.v, "max_exp_avg_sq": o.vmax}
    optimizer.state[parameter].update(state)
    parameter.grad = o.grad
    optimizer.step()


def correctly_rounded_sqrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "sqrt", square_root, raising=False)


OPTIONS = [
    {},
    {"weight_decay": 0.0},
    {"amsgrad": True},
    {"maximize": True},
    {"amsgrad": True, "maximize": True, "weight_decay": 0.3},
    {"betas": (0.3, 0.95)},
    {"betas": (0.5, 0.99)},
    {"betas": (0.0, 0.999)},
    {"eps": 0.0},
    {"eps": 1e-3, "lr": 0.7},
    {"lr": 0.0},
]
IN_TENSORS = [
    {"lr": torch.tensor(1e-3), "weight_decay": 0.1},
    {"lr": torch.tensor([3e-3]), "weight_decay": 0.1},
    {"lr": torch.tensor(1e-3, dtype=torch.float64), "weight_decay": 0.1},
    {"lr": torch.tensor(1e-3, dtype=torch.bfloat16), "amsgrad": True, "maximize": True},
    {"lr": torch.tensor(1), "eps": 1.0},
    {"betas": (torch.tensor(0.9), torch.tensor(0.999))},
    {"betas": (torch.tensor([0.3]), torch.tensor([0.95])), "lr": torch.tensor(1e-3)},
    {"betas": (torch.tensor(0.9, dtype=torch.float64), torch.tensor(0.999, dtype=torch.float64)), "weight_decay": 0.3},
    {"betas": (torch.tensor(0.9, dtype=torch.bfloat16), torch.tensor(0.99, dtype=torch.bfloat16))},
]
"""torch computes with these tensors, in their dtypes; fused=True reads numbers."""


@needs_torch_fma
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("options", OPTIONS + IN_TENSORS, ids=str)
def test_kernel_is_torch_optim(options: dict[str, Any], decoupled: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim on the CPU has the kernel's bits once its square root is correctly rounded.

    This holds in vector tails too.
    """
    group = GROUP | options
    for n, step in ((1, 1), (7, 2), (33, 3), (1003, 1000), (40_000, 7)):
        ours = operands(n, n, kind)
        theirs = ours.clone()
        kernel_(ours, AdamScalars.of(group, step, decoupled=decoupled, torch_cuda=False))
        with monkeypatch.context() as patch:
            correctly_rounded_sqrt(patch)
            torch_step(theirs, group, step, decoupled=decoupled)
        if not group["amsgrad"]:
            ours.vmax = None
        assert_same_bits(ours, theirs)


@needs_torch_fma
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("options", OPTIONS + IN_TENSORS, ids=str)
def test_kernel_is_torch_fused(options: dict[str, Any], decoupled: bool) -> None:
    """torch.optim(fused=True) on the CPU has the unchanged kernel's bits, in whole vectors.

    The compiler contracts its tails differently.
    """
    group = GROUP | options
    for kind in KINDS:
        ours = operands(64 * 100, 13, kind)
        theirs = ours.clone()
        kernel_(ours, AdamScalars.of({**group, "fused": True}, 7, decoupled=decoupled, torch_cuda=False))
        torch_step(theirs, group, 7, decoupled=decoupled, fused=True)
        assert_same_bits(replace(ours, grad=theirs.grad, vmax=ours.vmax if group["amsgrad"] else None), theirs)


@needs_torch_fma
@pytest.mark.parametrize("amsgrad", [False, True])
def test_torch_optim_as_it_is(amsgrad: bool) -> None:
    """With torch.optim's own square root the moments still agree to the bit.

    A parameter's step agrees to 4 units in the last place.
    """
    group = GROUP | {"amsgrad": amsgrad}
    ours = operands(200_000, 1, "normal")
    before, theirs = ours.master.clone(), ours.clone()
    kernel_(ours, AdamScalars.of(group, 3, decoupled=True, torch_cuda=False))
    torch_step(theirs, group, 3, decoupled=True)
    assert_same_bits(replace(ours, master=before), replace(theirs, master=before))
    decayed = before.mul(1 - group["lr"] * group["weight_decay"])
    step = (theirs.master.double() - decayed.double()).abs()
    allowed = 4 * step * 2.0**-23 + theirs.master.abs().double() * 2.0**-23
    assert bool(((ours.master.double() - theirs.master.double()).abs() <= allowed).all())


def test_square_root_is_correctly_rounded() -> None:
    """The op-by-op square root is libm's, which is correctly rounded.

    Normal, denormal and infinite values are tried.
    """
    x = torch.cat([operands(3000, 5, kind).v for kind in KINDS])
    libm = libm_function("sqrtf", 1)
    assert different_bits(square_root(x), torch.tensor([libm(value) for value in x.tolist()])) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_fma_rounds_once(kind: str) -> None:
    """The op-by-op fused multiply-add is libm's.

    That holds near cancellation too, and where double rounding would show.
    """
    o = operands(3000, 6, kind)
    a, b = o.grad, o.master
    libm = libm_function("fmaf", 3)
    halves = (a.double() * b.double()).float()  # a * b - halves is the rounding error of the product
    ties = torch.exp2(torch.randint(-30, 30, a.shape).float())
    one, ulp = torch.ones_like(a), torch.full_like(a, 2.0**-23)
    for x, y, c in ((a, b, o.m), (a, b, -halves), (a, one, b * 2.0**-25), (ties, one + ulp, ties * 2.0**-24)):
        expected = torch.tensor([libm(*values) for values in zip(x.tolist(), y.tolist(), c.tolist(), strict=True)])
        assert different_bits(fma(x, y, c), expected) == 0


def libm_function(name: str, arguments: int) -> Callable[..., float]:
    function = getattr(ctypes.CDLL("libm.so.6"), name)
    function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float] * arguments
    return function  # type: ignore[no-any-return]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3000), st.integers(0, 3000), DTYPES, st.booleans())
def test_chunks_do_not_show(n: int, cut: int, dtype: torch.dtype, torch_cuda: bool) -> None:
    """Updating a range in two calls, cut anywhere, gives the bits of one call."""
    cut = min(cut, n)
    scalars = AdamScalars.of(GROUP | {"amsgrad": True}, 5, decoupled=True, torch_cuda=torch_cuda, factors=(0.3,))
    whole = operands(n, 7, "bits", dtype, dtype)
    parts = whole.clone()
    kernel_(whole, scalars)
    kernel_(parts.cut(0, cut), scalars)
    kernel_(parts.cut(cut, n), scalars)
    assert_same_bits(whole, parts)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="builds x86 instruction sets")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("torch_cuda", [False, True])
def test_instruction_set_does_not_show(variant: str, torch_cuda: bool) -> None:
    """The wheel's builds and a scalar one give the native build's bits.

    All 65536 values of either 16-bit gradient format are tried.
    """
    flags = tuple(flag for flag in build.FLAGS if flag != "-march=native") + VARIANTS[variant]
    other = build.load(("kernels_c.cpp",), flags=flags)
    every16 = torch.arange(65536).to(torch.int16)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for kind in ("normal", "denormal", "bits"):
            native = operands(65536 + 13, 8, kind, dtype, torch.float16 if dtype == torch.float32 else dtype)
            if dtype != torch.float32:
                native.grad[:65536] = every16.view(dtype)
            varied = native.clone()
            for options in ({}, {"amsgrad": True, "betas": (0.4, 0.99)}):
                scalars = AdamScalars.of(GROUP | options, 2, decoupled=False, torch_cuda=torch_cuda, factors=(0.7, 1.9))
                kernel_(native, scalars)
                kernel_(varied, scalars, other)
                assert_same_bits(native, varied)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["native", *VARIANTS])
def test_weight_rounds_as_torch(dtype: torch.dtype, variant: str) -> None:
    """The 16-bit weight is torch's `.to(dtype)` of the master: ties, denormals, overflow, NaN."""
    if variant != "native" and platform.machine() != "x86_64":
        pytest.skip("builds x86 instruction sets")
    flags = build.FLAGS if variant == "native" else tuple(f for f in build.FLAGS if f != "-march=native") + VARIANTS[variant]
    shifted = torch.arange(65536, dtype=torch.int64) << 16
    near_ties = torch.cat([shifted + low for low in (0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001)])
    master = torch.where(near_ties >= 1 << 31, near_ties - (1 << 32), near_ties).to(torch.int32).view(torch.float32)
    n = master.numel()
    o = Operands(torch.zeros(n), master.clone(), torch.zeros(n), torch.ones(n), None, torch.empty(n, dtype=dtype))
    unchanged = AdamScalars.of(GROUP | {"lr": 0.0, "weight_decay": 0.0}, 1, decoupled=True, torch_cuda=False)
    kernel_(o, unchanged, build.load(("kernels_c.cpp",), flags=flags))
    assert o.out is not None
    assert different_bits(o.out, master.to(dtype)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_factors_are_mul_(dtype: torch.dtype) -> None:
    """Factors give what `grad.mul_` gives with a number or a 0-dim fp32 tensor.

    Each factor is one rounding to the gradient's dtype.
    """
    factors = (1.0 / 3.0, 0.0123, 1.7, 3.3)
    inside, outside = operands(5000, 9, "normal", dtype), operands(5000, 9, "normal", dtype)
    for i, factor in enumerate(factors):
        outside.grad.mul_(torch.tensor(factor) if i % 2 else factor)
    kernel_(inside, AdamScalars.of(GROUP, 4, decoupled=True, torch_cuda=False, factors=factors))
    kernel_(outside, AdamScalars.of(GROUP, 4, decoupled=True, torch_cuda=False))
    assert_same_bits(replace(inside, grad=outside.grad), outside)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_factors_are_those_of_the_widened_gradient(dtype: torch.dtype) -> None:
    """With WIDE_FACTORS a 16-bit gradient gives what its fp32 form gives.

    Every factor is applied in fp32. Without the flag factors round to 16 bits.
    """
    scalars = AdamScalars.of(GROUP, 3, decoupled=True, torch_cuda=False, factors=(1 / 3, 0.7))
    wide = replace(scalars, flags=scalars.flags | UpdateFlag.WIDE_FACTORS)
    narrow = operands(5000, 9, "normal", dtype)
    widened, rounded = narrow.clone(), narrow.clone()
    widened.grad = narrow.grad.float()
    kernel_(narrow, wide)
    kernel_(widened, scalars)
    kernel_(rounded, scalars)
    widened.grad = narrow.grad
    assert_same_bits(narrow, widened)
    assert different_bits(narrow.m, rounded.m) > 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weight_may_overwrite_gradient(dtype: torch.dtype) -> None:
    """One slot may hold the gradient in and the weight out."""
    apart = operands(2001, 10, "normal", dtype, dtype)
    slot = apart.clone()
    slot.out = slot.grad
    scalars = AdamScalars.of(GROUP, 4, decoupled=True, torch_cuda=True, factors=(0.5,))
    kernel_(apart, scalars)
    kernel_(slot, scalars)
    assert apart.out is not None
    assert different_bits(apart.out, slot.grad) == 0
    assert different_bits(apart.master, slot.master) == 0


def test_denormals_are_kept() -> None:
    """Without gradients, moments pass through the denormals and do not jump to zero."""
    o = operands(100, 11, "denormal")
    o.grad.zero_()
    o.v.fill_(2.0**-130)
    kernel_(o, AdamScalars.of(GROUP, 900, decoupled=True, torch_cuda=False))
    assert bool((o.v == torch.tensor(2.0**-130) * torch.tensor(0.999)).all())
    assert bool((o.v > 0).all())


@needs_torch_fma
def test_without_a_first_moment_a_zero_gradient_keeps_its_sign_as_torch_has_it() -> None:
    """With beta1 = 0 the moment is a zero of some sign where the gradient is -0.

    torch's CUDA kernel has fma(-(g - m), 1 - w, g), its CPU kernel fma(w - 1, g - m, g) in whole
    vectors.
    """
    before = torch.tensor([-1.0, 1.0] * 64)
    o = operands(128, 1, "normal")
    o.grad.fill_(-0.0)
    o.m.copy_(before)
    by_ops, by_cpu_form = o.clone(), o.clone()
    group = GROUP | {"betas": (0.0, 0.999)}
    kernel_(o, AdamScalars.of(group, 3, decoupled=True, torch_cuda=True))
    op_by_op_(by_ops, AdamScalars.of(group, 3, decoupled=True, torch_cuda=True))
    kernel_(by_cpu_form, AdamScalars.of(group, 3, decoupled=True, torch_cuda=False))
    assert o.m.signbit().tolist() == by_ops.m.signbit().tolist() == [True, False] * 64
    by_torch = torch.lerp(before, o.grad, 1.0)
    assert by_cpu_form.m.signbit().tolist() == by_torch.signbit().tolist() == [False, True] * 64


def test_struct_layout() -> None:
    """The structure handed to C++ is 68 bytes and carries every value."""
    scalars = AdamScalars.of(GROUP | {"amsgrad": True}, 3, decoupled=False, torch_cuda=True, factors=(2.0, 0.5))
    struct = scalars.c_struct
    assert ctypes.sizeof(ScalarsStruct) == 68
    assert (struct.factor_count, list(struct.factors)) == (2, [2.0, 0.5, 0.0, 0.0])
    assert (struct.flags, struct.l2, struct.decay) == (scalars.flags, ctypes.c_float(0.01).value, 1.0)
    assert all(getattr(struct, name) == getattr(scalars, name) for name in ("lerp", "beta2", "neg_step_size", "bias2_sqrt", "eps"))


def test_missing_vmax_is_refused() -> None:
    """AMSGrad without its state is an error, not a crash."""
    o = operands(4, 12, "normal")
    o.vmax = None
    scalars = AdamScalars.of(GROUP | {"amsgrad": True}, 1, decoupled=True, torch_cuda=False)
    with pytest.raises(AssertionError):
        kernel_(o, scalars)
    with pytest.raises(ValueError, match="max_exp_avg_sq"):
        op_by_op_(o, scalars)


def test_scalars_refuse_what_adam_has_not() -> None:
    """A beta1 outside [0, 1), a fifth factor and a hyper-parameter that is no number are refused.

    The error names them.
    """
    with pytest.raises(UnsupportedError, match="beta1"):
        AdamScalars.of(GROUP | {"betas": (1.0, 0.9)}, 1, decoupled=True, torch_cuda=False)
    with pytest.raises(UnsupportedError, match="5 multiplications"):
        AdamScalars.of(GROUP, 1, decoupled=True, torch_cuda=False, factors=(1.0,) * 5)
    with pytest.raises(UnsupportedError, match="is None: expected"):
        AdamScalars.of(GROUP | {"lr": None}, 1, decoupled=True, torch_cuda=False)


@pytest.mark.parametrize("fused", [False, True])
def test_a_learning_rate_in_a_tensor_is_computed_with_in_its_dtype(fused: bool) -> None:
    """As torch.optim does: in 16 steps some differ from those of the number, fused ones do not.

    The tensor may require grad, as one that is learned.
    """
    differ = []
    group = GROUP | {"weight_decay": 0.1, "fused": fused}
    for step in range(1, 17):
        rate = torch.tensor(1e-3, requires_grad=True)
        with_tensor = AdamScalars.of(group | {"lr": rate}, step, decoupled=True, torch_cuda=False)
        with_number = AdamScalars.of(group | {"lr": rate.item()}, step, decoupled=True, torch_cuda=False)
        expected = rate.item() if fused else rate.detach()
        assert with_tensor.neg_step_size == torch.tensor(-float(expected / (1 - 0.9**step))).item()
        assert with_tensor.decay == torch.tensor(float(1 - expected * 0.1)).item()
        differ.append(with_tensor != with_number)
    assert any(differ) is not fused
