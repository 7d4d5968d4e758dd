"""The verbs that only move data, so for tensors of every dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kolovod import _native
from kolovod.c10d.base import Base, Tensors, copying_back, paired, several
from kolovod.c10d.flat import Flat, spread
from kolovod.c10d.work import Work
from kolovod.core.verbs import ALLGATHER, ALLTOALL, BARRIER, BROADCAST
from kolovod.errors import GroupArgumentError

__all__ = ["ALLGATHER", "Moving"]


class Moving(Base):
    """broadcast, allgather, gather, scatter, alltoall and barrier, in c10d's variants."""

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        """Overwrite the tensors with the root's, all of them as one operation."""
        tensors = several("broadcast", tensors)
        flats = [self._flat(tensor, moves_only=True) for tensor in tensors]
        return self._start(
            BROADCAST,
            [flat.entry(flat.address) for flat in flats],
            opts,
            outputs=tensors,
            sources=flats,
            root=0 if opts is None else opts.rootRank,
            finish=copying_back(flats),
        )

    def barrier(self, opts: Any = None) -> Work:
        """Complete when every rank has come."""
        return self._start(BARRIER, [], opts, outputs=[], sources=[])

    # allgather ----------------------------------------------------------------------------------

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Work:
        """Put the ranks' inputs one after the other into ``output``, where ``input`` may lie."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """``all_gather_single`` of several as one operation."""
        pairs = []
        for source, target in paired("all_gather", inputs, outputs):
            part, whole = (
                self._flat(source, moves_only=True),
                Flat(target, moves_only=True, is_read=False),
            )
            check_part("all_gather", part, whole, self.size())
            part.stay_apart(whole, self.rank() * part.bytes)
            pairs.append((part, whole))
        return self._into(ALLGATHER, pairs, opts)

    def allgather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """``output_lists[i][r]`` receives input i of rank r; ranks may differ in its size."""
        inputs = several("all_gather", inputs)
        flats = [self._flat(tensor, moves_only=True) for tensor in inputs]
        lists = [outputs for _, outputs in paired("all_gather", inputs, output_lists)]

        def finish(engine: _native.Engine, number: int) -> None:
            for i, (flat, outputs) in enumerate(zip(flats, lists, strict=True)):
                counts = engine.rows(number, i)
                spread("all_gather", engine.output(number, i), counts, flat, outputs)

        return self._start(
            ALLGATHER,
            [flat.entry(0) for flat in flats],
            opts,
            outputs=[output for outputs in lists for output in outputs],
            sources=flats,
            finish=finish,
        )

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        """``output_lists[r][i]`` receives input i of rank r."""
        lists = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        return self.allgather(lists, inputs, opts)

    # from and to one rank -----------------------------------------------------------------------

    def gather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """``output_lists[0][r]`` on the root receives the input of rank r."""
        (source,) = inputs
        flat = self._flat(source, moves_only=True)
        is_root = opts.rootRank == self.rank()
        outputs = output_lists[0] if is_root else []

        def finish(engine: _native.Engine, number: int) -> None:
            if is_root:
                spread("gather", engine.output(number, 0), engine.rows(number, 0), flat, outputs)

        return self._start(
            ALLTOALL,
            [flat.entry(0)],
            opts,
            outputs=outputs,
            sources=[flat],
            finish=finish,
            splits=[flat.count if r == opts.rootRank else 0 for r in range(self.size())],
        )

    def scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any = None) -> Work:
        """``outputs[0]`` on rank r receives ``input_lists[0][r]`` of the root."""
        (output,) = outputs
        to = Flat(output, moves_only=True, is_read=False)
        if opts.rootRank == self.rank():
            parts = self._one_each("scatter", input_lists[0])
            source = Flat(self._joined(parts), moves_only=True)
            splits = [Flat.count_of(part) for part in parts]
        else:
            source, splits = Flat(output.new_empty(0), moves_only=True), [0] * self.size()

        def finish(engine: _native.Engine, number: int) -> None:
            check_received("scatter", engine.rows(number, 0)[opts.rootRank], to.count)

        return self._into(ALLTOALL, [(source, to)], opts, splits=splits, finish=finish)

    # alltoall -----------------------------------------------------------------------------------

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Send rows of ``input`` to all ranks, receive rows of ``output``; no sizes: even ones."""
        source, to = (
            self._flat(input, moves_only=True),
            Flat(output, moves_only=True, is_read=False),
        )
        source.stay_apart(to)
        expected = self._counts("output", to, output_split_sizes)

        def finish(engine: _native.Engine, number: int) -> None:
            for count, wanted in zip(engine.rows(number, 0), expected, strict=True):
                check_received("all_to_all", count, wanted)

        splits = self._counts("input", source, input_split_sizes)
        return self._into(ALLTOALL, [(source, to)], opts, splits=splits, finish=finish)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """``inputs[r]`` goes to rank r, ``outputs[r]`` comes from it."""
        parts = self._one_each("all_to_all", inputs)
        source = Flat(self._joined(parts), moves_only=True)

        def finish(engine: _native.Engine, number: int) -> None:
            counts = engine.rows(number, 0)
            spread("all_to_all", engine.output(number, 0), counts, source, outputs)

        return self._start(
            ALLTOALL,
            [source.entry(0)],
            opts,
            outputs=outputs,
            sources=[source],
            finish=finish,
            splits=[Flat.count_of(part) for part in parts],
        )

    def _counts(self, what: str, flat: Flat, rows: Sequence[int]) -> list[int]:
        """Return the number of elements of ``flat`` for each rank, from its numbers of rows.

        Raises InvalidArgumentError where it cannot be split so.
        """
        size, shape = self.size(), flat.tensor.shape
        if not rows:
            if (shape[0] if shape else 1) % size != 0:
                raise GroupArgumentError(
                    f"all_to_all: the {what} of shape {tuple(shape)} cannot be split evenly over "
                    f"{size} ranks; give {what}_split_sizes"
                )
            return [flat.count // size] * size
        if len(rows) != size or not shape or sum(rows) != shape[0]:
            raise GroupArgumentError(
                f"all_to_all: {what}_split_sizes {list(rows)} do not divide the {what} of shape "
                f"{tuple(shape)} over {size} ranks"
            )
        row = flat.count // shape[0] if shape[0] else 0
        return [count * row for count in rows]

    def _one_each(self, what: str, parts: Tensors) -> Tensors:
        if len(parts) != self.size():
            raise GroupArgumentError(
                f"{what}: {len(parts)} input tensors for {self.size()} ranks; give one for each"
            )
        return parts

    # The names before PyTorch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single


def check_part(what: str, part: Flat, whole: Flat, size: int) -> None:
    """Raise InvalidArgumentError unless ``whole`` is as large as the parts of all ranks."""
    if part.code != whole.code or part.count * size != whole.count:
        raise GroupArgumentError(
            f"{what}: a tensor of shape {tuple(part.tensor.shape)} and {part.tensor.dtype} is not "
            f"one of {size} equal parts of one of shape {tuple(whole.tensor.shape)} and "
            f"{whole.tensor.dtype}"
        )


def check_received(what: str, count: int, expected: int) -> None:
    """Raise InvalidArgumentError unless a rank has sent as much as there is room for."""
    if count != expected:
        raise GroupArgumentError(
            f"{what}: a rank has sent {count} elements where {expected} were expected"
        )
