"""Says which version of JAX has changed what it does not document, and Kolovod uses."""

from __future__ import annotations

import pytest
from forked import run_jax_ranks
from frameworks import is_installed

pytestmark = pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed")


def test_caches_effect_and_version_are_where_they_were():
    def work(rank):
        import jax
        import jax.numpy as jnp
        from jax.extend.core import Primitive
        from jax.interpreters import mlir

        from kolovod.private_apis import jax as private

        seen = []

        def lowering(context, operand):
            seen.append(private.has_caches(context.module_context))
            private.replace_caches(context.module_context, dict)
            return [operand]

        same = Primitive("same")
        same.multiple_results = True
        same.def_abstract_eval(lambda x: [x])
        mlir.register_lowering(same, lowering, **private.written_for_each_use())
        jax.jit(lambda x: same.bind(x)[0] + same.bind(x)[0]).lower(jnp.ones(2))
        assert seen == [True, True]
        assert "ordered" in repr(private.ordered_effect()).lower()
        assert all(isinstance(part, int) for part in private.version_of_ffi())

    run_jax_ranks(1, work)
