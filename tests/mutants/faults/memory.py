"""Faults of error feedback and momentum correction."""

from ..fault import Fault

MEMORY = [
    Fault(
        "momentum-factor-masking-forgotten",
        "dgc/memory.py",
        "return PassInputs(bucket.gradients, u, v, momentum, nesterov, sent, self.momentum_masking)",
        "return PassInputs(bucket.gradients, u, v, momentum, nesterov, sent)",
        ["tests/memory/test_memory.py"],
    ),
    Fault(
        "masking-forgotten-in-saved-states",
        "dgc/memory.py",
        'super().__init__("velocity", momentum_masking)',
        'super().__init__("velocity")',
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
        "tensor.copy_(state[name])",
        "tensor.add_(state[name] * 0)",
        ["tests/memory/test_memory.py"],
    ),
    Fault(
        "rounding-of-a-dense-step-lost",
        "dgc/memory.py",
        "self._snapshots.subtract(self._v, bucket, values)",
        "self._snapshots.subtract(self._v, bucket, self._v[bucket])",
        ["tests/memory/test_memory.py"],
    ),
    Fault(
        "dropped-dense-step-not-rolled-back",
        "dgc/state.py",
        "state.replace(bucket, whole)",
        "state.replace(bucket, state[bucket])",
        ["tests/memory/test_memory.py"],
    ),
    Fault(
        "sent-elements-not-removed-from-the-error",
        "dgc/memory.py",
        "sent=self._deferred.begin_pass_(bucket, None, v))",
        "sent=None)",
        ["tests/memory/test_memory.py"],
    ),
    Fault(
        "returned-elements-of-a-dropped-step-kept",
        "dgc/state.py",
        "self._returned.pop(bucket.name, None)",
        "self._returned.get(bucket.name, None)",
        ["tests/compression/test_exchanges.py"],
    ),
    Fault(
        "momentum-of-returned-elements-masked",
        "dgc/state.py",
        "kernel.remove_sent_(SparseVector(returned.indices, -returned.values, returned.count), None, v)",
        "kernel.remove_sent_(SparseVector(returned.indices, -returned.values, returned.count), u, v)",
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
