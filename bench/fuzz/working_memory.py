"""The definition of what a stage holds while it runs, once more and by brute force, for the planner's fuzzer."""

from __future__ import annotations

from functools import cache, cached_property

from fxsplit.ir.facts.costs import Costs


class Working:
    """Working memory of stages between two sets of nodes. Sets of nodes are bits of a number.

    bit: the bit of each node. full: all nodes. crossing: the bytes of values, and of gradients, that cross a cut right
    behind each set. divided: whether backwards are divided in two.
    """

    costs: Costs
    bit: dict[str, int]
    full: int
    crossing: dict[int, tuple[float, float]]
    divided: bool

    @cached_property
    def weighed(self) -> bool:
        """Whether it is known what nodes allocate."""
        return all(n.forward_peak_bytes is not None for n in self.costs.nodes)

    @cache  # noqa: B019
    def unkept(self, ideal: int) -> float:
        """Return the bytes of values that cross a cut right behind an ideal and that nothing keeps.

        Behind all nodes it is what the loss keeps of the outputs.
        """
        found = 0.0
        if self.weighed and ideal == self.full and not self.costs.inference:
            return self.crossing[ideal][0]
        for name, output, _, readers, returned in self.costs.values:
            made = name not in self.bit or ideal & self.bit[name]
            if made and (returned or any(not ideal & self.bit[r] for r in readers)):
                known = self.weighed and name in self.bit
                found += min(output, self.costs.by_name[name].unkept_bytes) if known else output
        return found

    def room(self, i: int) -> float:
        """Return what there must be room for while node `i` runs, beside what its stage keeps."""
        nodes, place = self.costs.nodes, {n.name: i for i, n in enumerate(self.costs.nodes)}
        ahead = max((nodes[i].forward_peak_bytes or 0.0) - nodes[i].kept_bytes, 0.0)
        behind = max(nodes[i].backward_peak_bytes, self.divided * nodes[i].halved_peak_bytes)
        for name, _, gradient, readers, returned in self.costs.values:
            made, read = place.get(name, -1), [place[r] for r in readers]
            # Made before, and read now or later.
            if 0 <= made < i and (returned or any(r >= i for r in read)):
                ahead += nodes[made].unkept_bytes
            # Its gradient is there from its last reader's backward on, to its maker's.
            if made <= i and any(r > i for r in read):
                behind += gradient
        return max(ahead, behind)

    @cache  # noqa: B019
    def working(self, begin: int, end: int) -> float:
        """Return what a stage between two ideals holds besides, while it runs."""
        if not self.weighed:
            return 0.0
        nodes = self.costs.nodes
        inside = [i for i, n in enumerate(nodes) if end & ~begin & self.bit[n.name]]
        first_outside = next((i for i, n in enumerate(nodes) if not begin & self.bit[n.name]), len(nodes))
        kept = sum(nodes[i].kept_bytes for i in inside)
        near = max((self.room(i) for i in inside), default=0.0)
        # Up to a node there are no more activations than all up to it but those that stages before have for sure.
        far = max((self.room(i) + sum(n.kept_bytes for n in nodes[first_outside : i + 1]) for i in inside), default=0.0)
        own = near if self.divided else min(near, far - kept + self.crossing[end][0] - self.unkept(end))
        loss = self.crossing[end][0] if end == self.full else 0.0
        gradients = self.crossing[begin][1] + self.crossing[end][1]
        return max(own, loss) + gradients + sum(nodes[i].handed_bytes for i in inside)
