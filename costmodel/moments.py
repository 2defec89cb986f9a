"""When is a rank fullest? What, beside weights and optimizer state, lives at the moments that can be a step's peak.

A backward pass frees activations and makes gradients, so a rank is fullest at the loss, at the first or the last layer
of a kind that it goes back through, while gradients are reduced, or in the optimizer. Each moment is a `Moment`; the
peak is the greatest. Letters: m = micro-batches of the step, n = layers of the rank, j = how many of them the backward
pass has not done, the one at work included.

Source of the FSDP2 lifetimes: torch 2.13, `_fsdp_param_group.py` and `foreach_reduce` of `_fsdp_collectives.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainplan.costmodel.activations import (
    backward_bytes,
    batch_bytes,
    boundary_bytes,
    edge_bytes,
    head_backward_bytes,
    kept_bytes,
    loss_bytes,
    norm_backward_bytes,
    recomputed_bytes,
    saved_bytes,
)
from trainplan.costmodel.layout import LayerKind, Layout
from trainplan.costmodel.work import Column, Shapes


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes alive at one moment.

    Attributes:
        gradients: Whole or sharded, accumulated or of this micro-batch.
        gathered: Gathered parameters, and the buffers that gather and reduce.
        activations: What waits for its backward.
        workspace: What all layers share, and what is gone a moment later.
    """

    gradients: Column
    gathered: Column
    activations: Column
    workspace: Column

    @property
    def total(self) -> Column:
        return np.asarray(self.gradients + self.gathered + self.activations + self.workspace)


def fullest(moments: Sequence[Moment]) -> Moment:
    """The greatest moment of each row."""
    best = moments[0]
    for moment in moments[1:]:
        greater = moment.total > best.total
        best = Moment(
            *(
                np.where(greater, getattr(moment, name), getattr(best, name))
                for name in ("gradients", "gathered", "activations", "workspace")
            )
        )
    return best


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank's moments depend on beside its shapes.

    Attributes:
        stages: The rank's stages.
        activations: Bytes of all micro-batches in flight at their most.
        m: Micro-batches per step.
        layer: Parameters of the rank per layer kind.
        head: Parameters of the output embedding on this rank; 0 without.
        table: Parameters of the input embedding on this rank; 0 without.
        own: Parameters of which the rank keeps fp32 weights, gradients and optimizer state.
        every: Parameters of the rank before sharding.
        edge: Parameters outside layers, in FSDP2's root unit.
        shard: Ranks that a unit is split over.
    """

    stages: list[int]
    activations: Column
    m: int
    layer: dict[LayerKind, Column]
    head: Column
    table: Column
    own: Column
    every: Column
    edge: Column
    shard: Column


def whole_moments(s: Shapes, place: Layout, held: Held, gradients: Column, gathered: Column) -> Iterator[Moment]:
    """Of a rank whose gradients are buffers for the whole step: the loss and the layers."""
    batch = batch_bytes(s)
    last, learns = place.num_stages - 1 in held.stages, s.job.workload.lora is None
    if last:
        for i, (work, saved) in enumerate(_at_the_head(s, held)):
            # its weight gradient, before it is added
            own = s.element_bytes * held.head if i == 1 and learns else np.zeros(())
            yield Moment(gradients, gathered, saved, batch + work + own)
    if 0 in held.stages and learns:  # the look-up's dense gradient, when the micro-batch's other activations are gone
        others = held.activations - sum((_stage_bytes(s, place, stage) for stage in held.stages), start=np.zeros(()))
        dense = s.element_bytes * held.table + boundary_bytes(s)
        yield Moment(gradients, gathered, np.maximum(others, 0), batch + dense)
    for stage in held.stages:
        for _, _, saved, work, _ in _at_layers(s, place, held, stage):
            yield Moment(gradients, gathered, saved, batch + work)


def _stage_bytes(s: Shapes, place: Layout, stage: int) -> Column:
    """What one micro-batch keeps of a stage's layers."""
    return np.asarray(
        sum(
            (
                count * (kept_bytes(s, kind) if again else saved_bytes(s, kind))
                for (kind, again), count in place.counts(stage).items()
            ),
            start=np.zeros(()),
        )
    )


def _at_the_head(s: Shapes, held: Held) -> list[tuple[Column, Column]]:
    """(workspace, activations) of the loss, of the head's product going back, and of the final norm going back."""
    return [
        (loss_bytes(s), held.activations),
        (head_backward_bytes(s), held.activations),
        (norm_backward_bytes(s), held.activations - edge_bytes(s)),
    ]


def _at_layers(
    s: Shapes, place: Layout, held: Held, stage: int
) -> Iterator[tuple[LayerKind, int, Column, Column, Column]]:
    """Of each kind's two first and two last layers: (kind, j in its stage, activations, workspace, activations after).

    Of these the second has the reduction before it and the gather after it beside it.
    """
    kinds, recomputed = place.kinds[stage], place.recomputed[stage]
    layers = [(kind, i < recomputed) for i, kind in enumerate(kinds)]
    keeps = {
        layer: kept_bytes(s, layer[0]) if layer[1] else saved_bytes(s, layer[0]) for layer in dict.fromkeys(layers)
    }
    edge = edge_bytes(s) if stage == place.num_stages - 1 else np.zeros(())
    for kind, again in keeps:
        places = [i for i, layer in enumerate(layers) if layer == (kind, again)]
        for i in dict.fromkeys((*places[:-3:-1], *places[1::-1])):
            above = sum((keeps[layer] for layer in layers[i + 1 :]), start=np.zeros(()))
            saved = np.asarray(held.activations - edge - above)
            work = backward_bytes(s, kind) + (recomputed_bytes(s, kind) if again else 0)
            yield kind, i + 1, saved, np.asarray(work), np.asarray(saved - keeps[kind, again])


def fsdp2_moments(s: Shapes, place: Layout, held: Held) -> Iterator[Moment]:
    """Of a rank of FSDP2 units: each layer, and a root unit with embedding, final norm and head.

    Sharded weights are counted elsewhere. A unit is gathered into a buffer and copied out of it; its gradients are
    copied into a reduction's input, which stays until the next unit's is made; what is reduced is the sharded gradient.
    ``none`` and ``optimizer``, and every pipeline, accumulate unsharded gradients in the reduction's type.
    """
    t, e, m = s.table, s.element_bytes, held.m
    width = np.where(t.chosen("reduce_dtype", "fp32"), 4, 2)
    plain = (t["dp_shard"] * t["dp_replicate"] * t["cp"] == 1) & t.chosen("precision", "fp32")  # no FSDP2 at all
    copies = np.where(plain, 0, e)  # bytes of a gathered parameter
    accumulates = np.asarray(~plain & (m > 1) & (~t.at_least("sharding", "gradients") | (t["pp"] > 1)))
    in_place = (m > 1) & (plain | (accumulates & (e == width)))  # gradients are added where they are, one at a time
    frees = t.chosen("sharding", "parameters") & t["reshard_after_forward"]
    keeps_on = ~t.chosen("sharding", "parameters") | (t["pp"] > 1)  # parameters, from micro-batch to micro-batch
    buffers = np.where(held.shard > 1, t["prefetch_units"], 0)
    largest = np.asarray(max(held.layer.values(), key=np.max, default=np.zeros(())))
    n = sum(len(place.kinds[stage]) for stage in held.stages)
    batch, flowing = batch_bytes(s), boundary_bytes(s)
    zero = np.zeros(())

    # Gradients that the micro-batches before left.
    partial = np.where(t["dp_replicate"] > 1, width, 4)  # not yet summed over the replicas
    before = (
        np.select([plain, accumulates], [4 * held.every, width * held.every], partial * held.own) if m > 1 else zero
    )
    # The root's is reduced last; its input stays for the next micro-batch.
    left = np.where(plain | accumulates, 0, width * held.edge) if m > 1 else zero
    tied = s.job.model.tie_word_embeddings
    # A tied weight's gradient from the head waits for the one from the look-up before it is added to any other.
    head_gradient = e * held.head if tied else np.where(in_place, 0, e * held.head)

    def gathered(units: Column, coming: Column) -> Column:
        """With so many parameters of units at hand and ``coming`` units in buffers."""
        return np.asarray(copies * held.edge + np.where(plain, 0, e * (units + coming * largest)))

    if place.num_stages - 1 in held.stages:
        all_layers = held.every - held.edge
        at_hand = gathered(np.where(frees, 0, all_layers), np.where(frees & (held.shard > 1), 1, 0))
        for i, (work, saved) in enumerate(_at_the_head(s, held)):
            yield Moment(before + (head_gradient if i == 2 else 0), at_hand + left, saved, batch + work)

    # The all-reduce over replicas keeps its buffer; where that is fp32 it is the gradient itself.
    summed = np.where((t["dp_replicate"] > 1) & (width != 4), 4 + width, 4)
    out = np.where(width == 4, 0, 4 / held.shard)  # the fp32 copy of a reduced gradient
    twice = np.where(held.shard == 1, width, 0)  # a group of one divides into a copy
    position = n
    for stage in held.stages[::-1]:
        size = len(place.kinds[stage])
        for kind, j_here, saved, work, saved_after in _at_layers(s, place, held, stage):
            unit = held.layer[kind]
            j = position - size + j_here
            done = (n - j) / max(n, 1)
            layers = held.every - held.edge
            below = layers * (j / max(n, 1))
            weight = np.where(in_place, 0, e * _last_product(s, kind))
            # In the last micro-batch, what is behind is reduced.
            reduced = summed * (held.own - held.edge / held.shard) * done
            this = np.select(
                [plain, accumulates], [0 if m > 1 else 4 * layers * done, reduced - width * layers * done], reduced
            )
            if (
                m > 1
            ):  # reduced shards are added to those before; the replicas' sum takes the place of their partial one
                this = np.where(plain | accumulates, this, reduced * (1 - 4 / summed) * (4 / width))
            gradients = before + this + head_gradient
            reducing = np.where(plain, 0, width * unit) if j < n else left
            at_hand = gathered(np.where(frees, unit, below), np.where(frees, np.minimum(buffers, j - 1), 0))
            yield Moment(gradients + weight, at_hand + reducing, saved, batch + work)
            if m > 1 and np.any(accumulates | keeps_on):
                # Before the last micro-batch: everything stays gathered, and gradients pile up. A pipeline that frees
                # units after forward keeps those that backward has been to (stage.py, `backward_maybe_with_nosync`).
                piled = before if m > 2 else np.where(accumulates, width * layers * done, zero)
                piled = np.where(accumulates, piled, partial * held.own * (m > 2))
                yield Moment(
                    np.where(plain, 0, piled + head_gradient + weight),
                    np.where(keeps_on, gathered(np.where(frees, layers * ((n - j + 1) / max(n, 1)), layers), zero), 0)
                    + np.where(accumulates, 0, reducing if m > 2 or j < n else 0),
                    np.where(keeps_on, saved, 0),
                    np.where(keeps_on, batch + work, 0),
                )
            # All gradients of the unit, at its first norm; the buffer of the last reduction is still there.
            at_hand = gathered(np.where(frees, unit, below), np.where(frees, np.minimum(buffers, j - 1), 0))
            whole = np.where(in_place, 0, e * unit)
            yield Moment(gradients + whole, at_hand + reducing, saved_after, batch + flowing + norm_backward_bytes(s))
            # The reduction of this unit: its gradients are copied into its input, then it is summed into shards.
            own_gradient = np.where(accumulates, 0, e * unit)
            summing = width * unit * (1 + 1 / held.shard) + np.maximum(twice, out) * unit
            buffer = np.maximum(own_gradient + width * unit, summing - np.where(accumulates, width * unit, 0))
            at_hand = gathered(np.where(frees, 0, below - unit), np.where(frees, np.minimum(buffers, j - 1), 0))
            yield Moment(gradients, np.where(plain, 0, at_hand + buffer), saved_after, batch + flowing)
        position -= size

    # The root: the look-up's gradient, where tied the head's and their sum; then the root's reduction.
    layers = held.every - held.edge
    look_up = e * held.table * (2 if tied else 1)
    done_layers = summed * (held.own - held.edge / held.shard)
    gradients = np.select(
        [plain, accumulates],
        [4 * held.every if m > 1 else 4 * layers, width * held.edge + done_layers],
        before if m > 1 else done_layers,
    )
    reducing = np.where(plain, 0, width * largest) + copies * held.edge
    yield Moment(gradients + head_gradient, reducing, zero, batch + flowing + look_up)
    # torch still refers to an untied head's gradient while the root's are summed
    summing = held.edge * (width * (1 + 1 / held.shard) + np.maximum(twice, out)) + (0 if tied else e * held.head)
    buffer = np.maximum((e + width) * held.edge, summing) - 4 * held.edge / held.shard
    yield Moment(4 * held.own, np.where(plain, 0, buffer), zero, batch)


def _last_product(s: Shapes, kind: LayerKind) -> Column:
    """Weights of a dense layer's last product, whose gradient is the first to exist."""
    width = s.job.model.ffn_hidden_size if kind[1] == "dense" else None
    return np.asarray((width or 0) * s.job.model.hidden_size / s.table["tp"])
