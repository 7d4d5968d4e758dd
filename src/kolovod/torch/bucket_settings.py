"""The first rank says how gradients travel: buckets of which size, in which compression."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kolovod.core import spans
from kolovod.core.collectives import Collectives
from kolovod.core.numpy_frontend import NumpyFrontend
from kolovod.core.world import current
from kolovod.gradients import choosing, plan, tuning
from kolovod.gradients.agreement import Agreement
from kolovod.gradients.compression import Compressor
from kolovod.gradients.spec import ReduceSpec
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.buckets import Buckets
from kolovod.torch.device import Cuda
from kolovod.torch.parameters import Parameters


class BucketSettings:
    """Makes the buckets when ranks meet, and anew between two steps when the first rank finds so.

    Ranks estimate links and measure times, and these differ; so only the first one's count.
    """

    def __init__(
        self,
        parameters: Parameters,
        buckets: Buckets,
        spec: ReduceSpec,
        verbs: TorchCollectives,
        agreement: Agreement,
        use: Callable[[Compressor], None],
        device: Cuda,
    ) -> None:
        """``use(compressor)``: from now on gradients are sent so; for a ``spec`` with choices."""
        self._parameters, self._buckets = parameters, buckets
        self._spec, self._verbs, self._agreement = spec, verbs, agreement
        self._use, self._device = use, device
        self.choice: choosing.Choice | None = None
        """The choice of a compression, if there are several."""
        self._trials: tuning.BucketTrials | None = None
        self._order: list[int] = []
        self._wanted_bytes = 0  # by trials
        self._on_device = False  # gradients are
        self._level = self._wanted_level = 0  # of spec.choices

    def details(self) -> list[tuple[str, Any]]:
        """Return the facts that must be the same on all ranks."""
        names = [name for name, _ in self._spec.choices]
        return [("compression", f"one of {', '.join(names)}")] if names else []

    def make(self, noted: Sequence[int], sparse_dims: Sequence[int]) -> None:
        """Make buckets: ranks have met. ``noted``: parameters in the order of their gradients."""
        self._on_device = any(map(self._device.is_on_device, self._parameters.tensors))
        if self._trials is None:
            self._trials = tuning.asked_for(self._agreement.number, on_device=self._on_device)
        if self._spec.choices and self.choice is None:
            names = [name for name, _ in self._spec.choices]
            log_file = current().settings.autotune_log_file
            log = tuning.log_to(log_file, self._agreement.number)
            self.choice = choosing.Choice(names, log)
        everyone = range(len(self._parameters))
        self._cut([*noted, *(i for i in everyone if i not in noted)], sparse_dims)

    def make_anew(self) -> None:
        """Make buckets anew, all ranks between two steps: the link or backward is another."""
        dims = self._buckets.sparse_dims()
        everyone = range(len(self._parameters))
        order = [*self._order, *sorted({*everyone} - {*self._order})]
        self._cut(order, [dims.get(index, 0) for index in everyone])

    def is_to_be_made_anew(self) -> bool:
        """Return, at a step's end, whether buckets must change; the first rank's answer counts."""
        world = self._verbs.world()
        if world.rank != 0:
            return False
        rate, all_bytes = self._link()
        if self.choice is not None:
            hosts = self._hosts() if rate else 1
            self._wanted_level = self.choice.wanted(self._level, rate, all_bytes, hosts)
        now = self._buckets.bucket_bytes
        if self._trials is None:
            is_to_be_cut = plan.is_to_be_cut_anew(now, rate, all_bytes, on_device=self._on_device)
        else:
            self._wanted_bytes = self._trials.next_bytes(now)
            is_to_be_cut = self._wanted_bytes != now
        return is_to_be_cut or self._wanted_level != self._level

    def _cut(self, order: list[int], sparse_dims: Sequence[int]) -> None:
        """Make buckets of all parameters as the first rank says."""
        rate, all_bytes = self._link()
        wanted = self._wanted_bytes or plan.bucket_bytes(rate, all_bytes, on_device=self._on_device)
        if self._verbs.world().rank == 0 and not self._wanted_bytes:
            why = f"links carry {rate:.0f} MB/s" if rate else "ranks are on one host"
            why += ", gradients on a GPU" if self._on_device else ""
            spans.chosen(f"buckets of {wanted >> 10} KiB: {why}")
        said = np.array([self._wanted_level, wanted, *order], np.int64)
        Collectives(NumpyFrontend(), self._verbs.world).broadcast_(said, 0, "optimizer.buckets")
        level, self._buckets.bucket_bytes, *self._order = said.tolist()
        if level != self._level:
            self._use(self._spec.choices[level][1])
        self._level = self._wanted_level = level
        self._buckets.rearrange(self._order)
        self._buckets.single_out(sparse_dims)
        self._buckets.accept(self._buckets.all, self._agreement.number)

    def _hosts(self) -> int:
        hosts = current().hosts
        ranks = getattr(self._spec.process_set, "ranks", range(len(hosts)))
        return len({hosts[rank] for rank in ranks})

    def _link(self) -> tuple[float, int]:
        """Return bytes per us of a link between hosts (0 on one host), and bytes of gradients."""
        rate = float(self._verbs.world().engine.stats()["link_bytes_per_us"])
        return rate, self._parameters.bytes
