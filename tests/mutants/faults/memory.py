"""Faults of error feedback and momentum correction."""

from ..fault import Fault

MEMORY = [
    Fault(
        "momentum-factor-masking-forgotten",
        "dgc/memory.py",
        "return PassInputs(bucket.gradients, u, v, momentum, nesterov, state.sent, self.momentum_masking)",
        "return PassInputs(bucket.gradients, u, v, momentum, nesterov, state.sent)",
        ["tests/memory/test_memory.py"],
    ),
    Fault(
        "masking-forgotten-in-saved-states",
        "dgc/memory.py",
        "errors=v, masking=self.momentum_masking)",
        "errors=v)",
        ["tests/memory/test_memory.py"],
    ),
    Fault(
        "non-finite-flag-lost-by-clipping",
        "dgc/memory.py",
        "return first",
        "return None",
        [
            "tests/memory",
            "tests/laws/test_laws.py::test_nonfinite_gradients_are_named_alike_on_every_rank[dgc-clipped]",
        ],
    ),
    Fault(
        "momentum-not-loaded",
        "dgc/state.py",
        "s.of(flat).copy_(parts[s.name])",
        "s.of(flat).copy_(parts[s.name] * 0)",
        ["tests/memory/test_memory.py"],
    ),
    Fault(
        "rounding-of-a-dense-step-lost",
        "dgc/compression/sparse.py",
        "errors = {table: v - values.float() for table in state.errors}",
        "errors = {table: v - v for table in state.errors}",
        ["tests/memory/test_memory.py"],
    ),
    Fault(
        "dropped-dense-step-not-rolled-back",
        "dgc/compression/sparse.py",
        "return Reduced(result, state.changed(errors=errors), dropped=state)",
        "return Reduced(result, state.changed(errors=errors), state.changed(errors=errors))",
        ["tests/memory/test_memory.py"],
    ),
    Fault(
        "sent-elements-not-removed-from-the-error",
        "dgc/memory.py",
        "return PassInputs(bucket.gradients, None, state.v, sent=state.sent)",
        "return PassInputs(bucket.gradients, None, state.v)",
        ["tests/memory/test_memory.py"],
    ),
    Fault(
        "returned-elements-of-a-dropped-step-kept",
        "dgc/compression/sparse.py",
        "inputs, state.next(sent=None, returned=None)",
        "inputs, state.next(sent=None)",
        ["tests/compression/test_exchanges.py"],
    ),
    Fault(
        "momentum-of-returned-elements-masked",
        "dgc/memory.py",
        "kernel.remove_sent_(SparseVector(returned.indices, -returned.values, returned.count), None, self.v)",
        "kernel.remove_sent_(SparseVector(returned.indices, -returned.values, returned.count), self.u, self.v)",
        ["tests/compression/test_exchanges.py"],
    ),
    Fault(
        "global-norm-summed-not-averaged",
        "dgc/memory.py",
        "(mean,) = yield (AllReduce(squares),)",
        '(mean,) = yield (AllReduce(squares, "sum"),)',
        ["tests/memory"],
    ),
    Fault(
        "short-gradients-stretched-to-the-limit",
        "dgc/memory.py",
        "part.mul_((self.max_norm / (norm + 1e-6)).clamp(max=1.0))",
        "part.mul_(self.max_norm / (norm + 1e-6))",
        ["tests/memory"],
    ),
]
