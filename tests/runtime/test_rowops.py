"""Norm, activation and rotation against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kernels import _cpu

ISAS = _cpu.isas()
SIZES = [16, 24, 64, 576, 1000]


def _vectors(count, n):
    rng = np.random.default_rng(n)
    return tuple(rng.standard_normal(n, dtype=np.float32) for _ in range(count))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", SIZES)
def test_rms_norm_is_its_definition(isa, n):
    x, w = _vectors(2, n)
    want = x.astype(np.float64) / np.sqrt(np.mean(x.astype(np.float64) ** 2) + 1e-5) * w
    np.testing.assert_allclose(_cpu.rms_norm(x, w, 1e-5, isa), want, rtol=2e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_activation_is_its_definition_also_far_out(isa, n, act):
    gate, up = _vectors(2, n)
    gate *= 3
    gate[:4] = (100, -100, 0, -20)
    x = gate.astype(np.float64)
    z = x if act == "silu" else 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    want = x / (1 + np.exp(-np.clip(z, -700, 700))) * up
    np.testing.assert_allclose(_cpu.act_mul(act, gate, up, isa), want, rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("half", [8, 16, 32, 40, 48, 128])
def test_rope_rotates_pairs(isa, half):
    x, _ = _vectors(2, 2 * half)
    angle = np.linspace(0, 50, half)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * angle)
    got = _cpu.rope(x, cos, sin, isa)
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag]), atol=1e-6)
