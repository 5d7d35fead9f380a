"""What a sharded module can do beside what its own class can."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor, nn

from autoshard.runtime import state


class ShardedModule(nn.Module):
    """Mixed into the class of every module that heads a unit; `isinstance` tells such modules."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all parameters so that their norm is at most `max_norm`.

        The norm is that of the replicated model: of all gradients as one vector. One small
        all-reduce for all parameters that are cut over the same ranks. A parameter that is
        not sharded counts once, with this rank's gradient, which should be the same on every
        rank; one without a gradient doesn't count. All ranks must call it together.

        norm_type: p of the p-norm, greater than 0; inf for the largest absolute value.

        Returns the norm before scaling, a plain scalar, f32 (f64 if a parameter is), the same on
        every rank; 0 if there is no gradient. A norm of inf or NaN is returned, and scaled by, as
        in `torch.nn.utils.clip_grad_norm_`.
        Raises ValueError for a norm_type that is not greater than 0, or a gradient laid out
        as a partial sum; RuntimeError inside `full_params()`.
        """
        return state.clip_grad_norm_(self, max_norm, norm_type)

    def full_params(self, *, writeback: bool = True) -> AbstractContextManager[None]:
        """A context in which all parameters of this module and below are whole, on every rank.

        Inside, `module.weight`, `parameters()` and `state_dict()` give plain tensors of the
        whole size, ties kept, without gradients. All ranks must enter together; leaving needs
        no other rank, so that what is done inside may differ. It takes the memory of the whole
        module once more on every rank.

        A forward inside works under `torch.no_grad()`, without collectives, and eagerly if the
        module is compiled; with gradients it raises RuntimeError, as they would be lost.

        writeback: keep what was written to parameters inside, or set to them, `requires_grad`
            too, also if the block raises: each rank keeps its own rows, so all ranks must write
            the same. False drops it.

        Raises RuntimeError for a parameter on meta, inside a forward, a backward or a
        `full_params()` of the same parameters, and on leaving if gradients were made inside;
        ValueError on leaving if a parameter was removed, or given another size or dtype.
        """
        return state.full_params(self, writeback=writeback)
