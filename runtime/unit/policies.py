"""Policies of a unit: in which dtypes it works, and where its shards live."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of one unit; None leaves a dtype as it is.

    param_dtype: of gathered parameters, and so of compute. Shards, and what optimizers
        see, stay in the parameter's own.
    reduce_dtype: of gradients while they are reduced, and accumulated before that; by
        default the dtype in which they were computed.
    output_dtype: to which floating-point outputs of the unit's modules are cast.
    cast_forward_inputs: whether floating-point inputs of the unit's modules are cast to
        `param_dtype`.
    buffer_dtype: to which floating-point buffers are cast, once; a state dict has them in
        their own dtype. Buffers of ignored modules are left alone.
    keep_low_precision_grads: leave `.grad` in the dtype in which it was reduced, rather
        than cast it to the parameter's own.
    full_precision_in_eval: compute in the parameter's own dtype, with buffers in theirs and
        inputs not cast, while the unit's first module is in eval mode.
    Raises ValueError for a dtype that is not of floating point, or a flag that is no bool.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    full_precision_in_eval: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a dtype that is not of floating point, or a flag that is no bool."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_dtype"):
                if value is not None and not _is_floating(value):
                    raise ValueError(
                        f"MixedPrecisionPolicy.{field.name} is {value!r}; expected a floating "
                        "point torch.dtype or None"
                    )
            elif not isinstance(value, bool):
                raise ValueError(
                    f"MixedPrecisionPolicy.{field.name} is {value!r}; expected True or False"
                )


@dataclass(frozen=True)
class OffloadPolicy:
    """Policy of what lives on the host between steps: with this one, nothing does."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and optimizer states live in host memory, and are copied as needed.

    pin_memory: in page-locked memory, from which copies are asynchronous; without an
        accelerator it makes no difference.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class OptimizerOffloadPolicy(OffloadPolicy):
    """Optimizer states live in host memory between steps, shards and gradients on the device.

    They are copied to the device for the update, some at a time, and back. So the update is that of
    states on the device, bit for bit.

    pin_memory: as of `CPUOffloadPolicy`.
    bucket_bytes: states that are copied together, at least; up to three times as many are on the
        device at a time.
    Raises ValueError for a number of bytes that is none, or below 1.
    """

    pin_memory: bool = True
    bucket_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        """Raise ValueError for a number of bytes that is none, or below 1."""
        if type(self.bucket_bytes) is not int or self.bucket_bytes < 1:
            raise ValueError(
                f"OptimizerOffloadPolicy.bucket_bytes is {self.bucket_bytes!r}; expected a number "
                "of bytes"
            )


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point
