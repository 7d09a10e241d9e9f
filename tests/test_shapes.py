"""Shapes in signatures are checked while the tests run, and stand wherever arrays are taken."""

from __future__ import annotations

import ast
from pathlib import Path

import jax.numpy as jnp
import pytest
import shapes
from jaxtyping import Float, TypeCheckError, jaxtyped

from jaxformer import losses
from jaxformer.config import AttentionConfig
from jaxformer.decode import top_k
from jaxformer.nn import layers, masks
from jaxformer.nn.kernels import dense
from jaxformer.types import Array, Slots

PACKAGE = Path(__file__).resolve().parents[1] / "jaxformer"
FILES = [file for room in shapes.ROOMS for file in sorted(PACKAGE.parent.glob(room.replace(".", "/") + "*"))]
FILES = sorted({path for file in FILES for path in (file.rglob("*.py") if file.is_dir() else [file])})


def test_a_wrong_rank_is_refused():
    with pytest.raises(TypeCheckError, match="segment"):
        masks.slots_from_segments(jnp.ones(3, jnp.int32))


def test_a_wrong_type_is_refused():
    with pytest.raises(TypeCheckError, match="segment"):
        masks.slots_from_segments(jnp.ones((2, 3)))
    with pytest.raises(TypeCheckError, match="labels"):
        losses.cross_entropy(jnp.ones((2, 3)), jnp.ones(2), jnp.ones(2))


def test_a_letter_is_one_size_within_a_call():
    with pytest.raises(TypeCheckError, match="weights"):
        losses.cross_entropy(jnp.ones((2, 3)), jnp.ones(2, jnp.int32), jnp.ones(4))
    top_k.top_k(jnp.ones((2, 3)), 1), top_k.top_k(jnp.ones((4, 5)), 1)  # and another in the next


def test_methods_of_modules_are_checked():
    norm = layers.BatchNorm(1e-6, 0.9)
    with pytest.raises(TypeCheckError, match="BatchNorm.__call__"):
        norm.init({}, jnp.ones((2, 3)))


def first_column(matrix: Float[Array, "B T"], wrong: bool = False) -> Float[Array, "B"]:  # noqa: F821
    return matrix[0] if wrong else matrix[:, 0]


def test_results_are_checked_with_the_letters_of_the_arguments():
    checked = jaxtyped(typechecker=shapes.check)(first_column)
    assert checked(jnp.ones((2, 3))).shape == (2,)
    with pytest.raises(TypeCheckError, match="return value"):
        checked(jnp.ones((2, 3)), wrong=True)


def test_an_alias_of_an_array_is_one():
    mask = masks.Mask(Slots(None, None), Slots(None, None))
    keys = jnp.ones((1, 3, 2, 4))
    with pytest.raises(TypeCheckError, match="attend.*\n*.*Queries|parameter 'q'|q="):
        dense.attend(jnp.ones(3), keys, keys, mask, None, None, AttentionConfig(heads=2))


def test_structures_may_hold_anything():
    mask = masks.Mask(Slots(None, 1), Slots("", object()))
    assert mask.replace(query=3).query == 3


def signatures(path: Path):
    """Every function and method of a file that is not within a function."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for each in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(each, ast.FunctionDef):
                yield each


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrays_have_shapes_in_signatures(path):
    """Wherever a signature says `Array`, it is the kind of array of an annotation such as `Float[Array, "B T"]`."""
    for function in signatures(path):
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        hints = [each.annotation for each in every if each and each.annotation] + [function.returns]
        for hint in filter(None, hints):
            assert not bare(hint), f"{function.name}, line {function.lineno}: an Array without a shape"


def bare(hint: ast.expr) -> bool:
    """Whether an annotation names arrays without saying of what shape. Callables' arrays are their own."""
    if isinstance(hint, ast.Subscript) and ast.unparse(hint.value) == "Callable":
        return False
    if isinstance(hint, ast.Subscript) and isinstance(hint.slice, ast.Tuple) and len(hint.slice.elts) == 2:
        kind, axes = hint.slice.elts
        if ast.unparse(kind) == "Array" and isinstance(axes, ast.Constant):
            return False
    if isinstance(hint, ast.Name):
        return hint.id == "Array"
    return any(bare(child) for child in ast.iter_child_nodes(hint) if isinstance(child, ast.expr))
