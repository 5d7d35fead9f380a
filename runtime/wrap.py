"""Which modules of a model become units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from torch import nn

Policy = Callable[[nn.Module], bool]
"""Says of a module whether it becomes a unit of its own."""


class ModuleWrapPolicy:
    """Make a unit of every module that is an instance of one of `module_classes`."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = tuple(set(module_classes))

    def __call__(self, module: nn.Module) -> bool:
        return isinstance(module, self._module_classes)

    def __repr__(self) -> str:
        names = sorted(cls.__name__ for cls in self._module_classes)
        return f"ModuleWrapPolicy({', '.join(names)})"


def find_units(model: nn.Module, policy: Policy | None) -> list[nn.Module]:
    """The modules of `model`, parents first and without `model`, that become units.

    With a policy, those it names. Without, those whose class Hugging Face's
    `_no_split_modules` lists, or else the model's repeated blocks.
    """
    if policy is None:
        classes = _no_split_classes(model)
        blocks = set() if classes else _repeated_blocks(model)

        def policy(module: nn.Module) -> bool:
            return type(module) in classes or module in blocks

    return [
        module
        for module in model.modules()
        if module is not model and _has_forward(module) and policy(module) and _has_params(module)
    ]


def _no_split_classes(model: nn.Module) -> set[type]:
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return {type(module) for module in model.modules() if type(module).__name__ in names}


def _repeated_blocks(model: nn.Module) -> set[nn.Module]:
    """The modules that stand, twice or more, beside each other in one container.

    A transformer's blocks sit in one ModuleList or Sequential; a block is a module with
    children of its own. Blocks inside such blocks (experts, heads) stay with theirs.
    """
    found: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        children = list(module.children())
        counts = Counter(type(child) for child in children if list(child.children()))
        repeated = set()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            repeated = {cls for cls, count in counts.items() if count > 1 and _is_block(cls)}
        for child in children:
            if type(child) in repeated:
                found.add(child)
            else:
                visit(child)

    visit(model)
    return found


def _is_block(cls: type) -> bool:
    return not issubclass(cls, (nn.ModuleList, nn.ModuleDict))


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
