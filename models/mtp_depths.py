"""MTP as DeepSeek-V3 writes it: every depth attends to the states of its own depth, in a cache of
its own.

Paper: DeepSeek-V3 (arXiv 2412.19437), section 2.2; transformers' `use_mtp` decodes in this way.

    s(0, t)   = final hidden state of position t
    s(k+1, t) = module_k([token t+1+k ; s(k, t)]) at its slots 0 .. t         predicts token t+2+k

*Depth k of slot t* is an entry in cache k, at the slot's own rotary position t at every depth (a
shift of all positions of a cache changes nothing). It exists once token t+1+k is known, so with
`length` committed tokens cache k holds slots 0 .. length - 2 - k for good.

Training runs each depth over the whole text, true tokens everywhere.

Drafting. The root (last committed token, position length - 1) is read by the newest committed entry
of every cache. A drafted token of depth e below the root is at position length - 1 + e; its entry
in cache k lies at slot length - 2 - k + e and reads s(k, ...) of its parent's entry in cache k - 1.
So the entries of a cache beyond the committed ones are the drafted tokens, their positions are the
newest committed slot plus the depth of the token, each sees its ancestors, and the logits of
what follows a token of depth e come from cache e. For that cache e needs its ancestors' entries
too; those are made when first needed. A chain of n tokens takes n (n - 1) / 2 entries.

Beyond the last cache (depths that no step was trained for, K > num_steps) a token goes into the
last cache and reads its parent's state there: the recursion of `chain`. transformers drafts no
deeper than its modules; vLLM's runner that reads MTP applies the first module at every depth.

Check: tests/test_mtp.py compares cached drafting with training, depth by depth;
tests/test_mtp_golden.py replays transformers' rounds.

Axes: rows (any gathered slots), hidden, batch, seq, new (rows read by one sequence), cached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from draftsmith.models.draft_layer import DraftLayer, Rope
from draftsmith.models.draft_reader import DraftState, RowsToRead, run_layers
from draftsmith.models.mtp_module import MtpDraft
from draftsmith.models.protocols import DraftContext, Frontier, TrainBatch
from draftsmith.models.sequence_cache import SequenceCache
from draftsmith.models.ttt_chain import causal_step
from draftsmith.models.ttt_slots import SlotPlan


@dataclass
class DepthCache(DraftState):
    """The cache of one depth; `hidden` has the state of the newest committed entry, if there is
    one, then those of `nodes`."""

    nodes: list[int] = field(default_factory=list)
    """Drafted tokens that it holds besides the committed entries, in order."""


@dataclass
class DepthsState:
    """One sequence: a cache per depth, and the drafted tokens of the round as a tree."""

    depths: list[DepthCache]
    length: int = 0
    """Committed tokens."""
    tokens: list[Tensor] = field(default_factory=list)
    """[1] each: token of node 1, 2, ...; node 0 is the root."""
    parents: list[int] = field(default_factory=lambda: [-1])
    """Of every node."""
    node_depths: list[int] = field(default_factory=lambda: [0])
    """Distance of every node from the root."""
    is_chain: bool = True

    @property
    def hidden(self) -> Tensor:
        """[1, hidden] state of the newest node."""
        last = min(self.node_depths[-1], len(self.depths) - 1)
        state = self.depths[last].hidden
        assert state is not None, "read() comes first"
        return state[-1:]

    def clear(self) -> None:
        """Forgets the round's drafted tokens."""
        self.tokens, self.parents, self.node_depths, self.is_chain = [], [-1], [0], True
        for depth in self.depths:
            depth.nodes = []
            depth.hidden = (
                depth.hidden[:1] if depth.cache.committed and depth.hidden is not None else None
            )

    def add(self, frontier: Frontier) -> range:
        """Notes new nodes and returns their numbers."""
        first = len(self.parents)
        self.is_chain &= frontier.is_chain
        parents = [first - 1] if frontier.is_chain else frontier.parents.tolist()
        self.tokens += frontier.tokens.split(1)
        self.parents += parents
        self.node_depths += [self.node_depths[parent] + 1 for parent in parents]
        return range(first, len(self.parents))

    def path(self, node: int) -> list[int]:
        """A node and its ancestors, the root left out, downwards."""
        path = []
        while node:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def slot(self, depth: int, node: int) -> int:
        """Where a node's entry lies in cache `depth`; below 0 there is none."""
        return self.length - 2 - depth + self.node_depths[node]

    def missing(self, depth: int, nodes: Sequence[int]) -> list[int]:
        """Nodes that cache `depth` still needs before it can predict what follows `nodes`."""
        needed = {above for node in nodes for above in self.path(node)}
        needed = {node for node in needed if self.slot(depth, node) >= 0}
        return sorted(needed.difference(self.depths[depth].nodes))

    def parent_states(self, depth: int, nodes: Sequence[int]) -> Tensor:
        """[nodes, hidden] what the nodes' entries in cache `depth` read."""
        last = len(self.depths) - 1
        states = []
        for node in nodes:
            # A node deeper than the last cache reads its parent's state there.
            above = depth if depth == last < self.node_depths[node] else depth - 1
            source, parent = self.depths[above], self.parents[node]
            assert source.hidden is not None, "read() comes first"
            held = len(source.hidden) - len(source.nodes)  # 1, or 0 where nothing is committed.
            row = held + source.nodes.index(parent) if parent else 0
            states.append(source.hidden[row : row + 1])
        return torch.cat(states)


@dataclass
class DepthRows(RowsToRead):
    """Drafted rows of one cache. A chain's are consecutive and causal, as committed ones are."""

    at: Tensor | None = None
    """[new] positions; None: consecutive."""
    seen: Tensor | None = None
    """[new, cached] bool; None: all before."""

    def rope(self) -> Rope:
        """cos and sin of the rows' positions."""
        if self.at is None:
            return super().rope()
        cos, sin = self.state.rope
        return cos[self.at], sin[self.at]

    def keep_mask(self) -> Tensor | None:
        """[new, cached] bool, what each row sees; None: all before it."""
        return self.seen


class DepthwiseMtpDraft(MtpDraft):
    """The draft model with a cache per depth, one module for all of them or one each."""

    depth_attention = "full"

    @property
    def num_caches(self) -> int:
        """Caches of a sequence: one per trained depth."""
        return len(self.step_weights)

    def _module(self, depth: int) -> int:
        return min(depth, self.config.num_modules - 1)

    def _layers_of(self, depth: int) -> Sequence[DraftLayer]:
        count = self.config.num_hidden_layers
        first = self._module(depth) * count
        return list(self.layers)[first : first + count]

    def _outputs(self, depth: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, hidden] out of the block -> what the head reads, and what the next depth reads."""
        normed = self.norm[self._module(depth)](hidden)
        return normed, normed if self.config.recycle == "after_norm" else hidden

    def _head_input(self, fed_back: Tensor) -> Tensor:
        return fed_back  # `_unroll` gives what the head reads: norms belong to their module.

    # Training.

    def _unroll(self, batch: TrainBatch, plan: SlotPlan, target_head: nn.Module) -> list[Tensor]:  # noqa: ARG002
        """What the head reads at each depth, [active, hidden]."""
        positions = batch.position_ids.flatten()
        rope = self._table(int(positions.max()) + 1)
        embedded = self._embed(batch.input_ids.flatten())
        state = self._features(batch).flatten(0, 1).index_select(0, plan.pairs)
        known, slots = batch.keep_mask, plan.pairs
        made = []
        steps = len(self.step_weights)
        for depth in range(steps):
            known = _moved_left(known)  # Slots whose token t+1+depth is real.
            before, slots = slots, known.flatten().nonzero().squeeze(-1)
            wanted = known.flatten()[plan.active]
            # Every slot is read by the next depth; after the last one only by the head.
            asked = plan.active[wanted] if depth == steps - 1 else slots
            part = dataclasses.replace(
                plan, pairs=slots, active=asked, active_pairs=torch.searchsorted(slots, asked)
            )

            def one_depth(
                state: Tensor, depth: int = depth, part: SlotPlan = part
            ) -> tuple[Tensor, Tensor]:
                module = self._module(depth)
                tokens = self._token_part(module, embedded.index_select(0, part.pairs + 1 + depth))
                at = positions.index_select(0, part.pairs)
                if self.zeroes_first_slot:
                    tokens = tokens * (at != 0)[:, None]
                entered = tokens + self._state_part(module, state), tokens
                layers = self._layers_of(depth)
                turned = rope[0][at], rope[1][at]
                hidden, _ = causal_step(layers, part, entered, turned, grid=batch.input_ids.shape)
                return self._outputs(depth, hidden)

            state = state.index_select(0, torch.searchsorted(before, slots))
            if self.config.checkpoint_steps and torch.is_grad_enabled():
                normed, state = checkpoint(one_depth, state, use_reentrant=False)
            else:
                normed, state = one_depth(state)
            # Slots whose token is missing at this depth have no prediction there.
            rows = torch.searchsorted(asked, plan.active[wanted])
            full = normed.new_zeros(len(plan.active), normed.shape[-1])
            at_active = wanted.nonzero().squeeze(-1)
            made.append(full.index_copy(0, at_active, normed.index_select(0, rows)))
        return made

    # Drafting.

    def start(self, max_length: int) -> DepthsState:  # type: ignore[override]
        """Empty caches for one sequence of at most `max_length` tokens."""
        rope = self._table(0)
        state = DepthsState([DepthCache(SequenceCache(), rope) for _ in range(self.num_caches)])
        self._reserve_all(state, min(max_length, self.config.max_position_embeddings))
        return state

    @torch.no_grad()
    def read(  # type: ignore[override]
        self, contexts: Sequence[DraftContext], states: Sequence[DepthsState]
    ) -> Tensor:
        """Reads what was committed into every cache; see `AutoregressiveDraft`.

        Raises:
            ValueError: if a context does not continue what its state has seen.
        """
        above: list[Tensor] = []  # Per sequence, what its new entries of a depth read.
        for context, state in zip(contexts, states, strict=True):
            new = context.final_hidden_states.shape[1]
            self._check_continues(context, state.depths[0], new)
            state.clear()
            state.length = context.token_ids.shape[1]
            self._reserve_all(state, state.length - 1)
            above.append(context.final_hidden_states[0].to(self.dtype))
        logits = None
        for depth in range(self.num_caches):
            reads, kept = [], []
            for index, (context, state) in enumerate(zip(contexts, states, strict=True)):
                cache = state.depths[depth].cache
                new = state.length - 1 - depth - cache.committed
                if new > 0:  # The first tokens of a text are too few for the deeper caches.
                    tokens = context.token_ids[0, cache.committed + 1 + depth :]
                    reads.append(RowsToRead(state.depths[depth], tokens, cache.committed, new))
                    kept.append(index)
            if not reads:
                break
            states_above = torch.cat([above[index] for index in kept])
            normed, fed_back = self._run(depth, reads, states_above, drafted=False)
            first = 0
            for index, read in zip(kept, reads, strict=True):
                made = fed_back[first : first + read.new]
                first += read.new
                before = read.state.hidden
                # The next depth has yet to read the entry that was the newest one before.
                older = [] if before is None else [before[:1]]
                above[index] = torch.cat([*older, made[:-1]])
                read.state.cache.keep(range(read.new))
                read.state.hidden = made[-1:]
            if logits is None:
                ends = torch.tensor([read.new for read in reads]).cumsum(0) - 1
                logits = self._logits(normed[ends.to(normed.device)])
        assert logits is not None, "every context brings something"
        return logits

    @torch.no_grad()
    def extend(  # type: ignore[override]
        self, states: Sequence[DepthsState], frontiers: Sequence[Frontier]
    ) -> Tensor:
        """Reads drafted tokens, each into the cache of its depth, with what is missing there."""
        last = self.num_caches - 1
        added = [state.add(frontier) for state, frontier in zip(states, frontiers, strict=True)]
        found: dict[tuple[int, int], Tensor] = {}
        for depth in range(last + 1):
            reads, read_nodes, owners = [], [], []
            for index, (state, new) in enumerate(zip(states, added, strict=True)):
                own = [node for node in new if min(state.node_depths[node], last) == depth]
                if own:
                    missing = state.missing(depth, own)
                    reads.append(self._drafted_rows(state, depth, missing))
                    read_nodes.append(missing)
                    owners.append(index)
            if not reads:
                continue
            above = [
                states[owner].parent_states(depth, nodes)
                for owner, nodes in zip(owners, read_nodes, strict=True)
            ]
            normed, fed_back = self._run(depth, reads, torch.cat(above), drafted=True)
            first = 0
            for owner, nodes in zip(owners, read_nodes, strict=True):
                cache = states[owner].depths[depth]
                cache.nodes += nodes
                states_before = [] if cache.hidden is None else [cache.hidden]
                cache.hidden = torch.cat([*states_before, fed_back[first : first + len(nodes)]])
                found.update(
                    ((owner, node), normed[first + row : first + row + 1])
                    for row, node in enumerate(nodes)
                )
                first += len(nodes)
        wanted = [found[index, node] for index, nodes in enumerate(added) for node in nodes]
        return self._logits(torch.cat(wanted))

    def _run(
        self, depth: int, reads: Sequence[RowsToRead], above: Tensor, *, drafted: bool
    ) -> tuple[Tensor, Tensor]:
        """New entries of one depth's caches -> what the head reads and the next depth reads."""
        module = self._module(depth)
        ids = torch.cat([read.tokens for read in reads])
        tokens = self._token_part(module, self._embed(ids))
        if not drafted:
            self._zero_first_slots(tokens, reads)
        hidden = tokens + self._state_part(module, above)
        layers = self._layers_of(depth)
        return self._outputs(depth, run_layers(layers, reads, hidden, tokens, ends_only=False))

    def _drafted_rows(self, state: DepthsState, depth: int, nodes: Sequence[int]) -> DepthRows:
        """What cache `depth` reads of drafted tokens."""
        cache = state.depths[depth]
        committed, held = cache.cache.committed, len(cache.nodes)
        self._reserve_all(state, committed + held + len(nodes))
        tokens = torch.cat([state.tokens[node - 1] for node in nodes])
        read = DepthRows(cache, tokens, committed + held, len(nodes))
        if not state.is_chain:
            after = [*cache.nodes, *nodes]
            paths = [set(state.path(node)) for node in nodes]
            seen = [[True] * committed + [other in path for other in after] for path in paths]
            at = [state.slot(depth, node) for node in nodes]
            read.seen = torch.tensor(seen, device=tokens.device)
            read.at = torch.tensor(at, device=tokens.device)
        return read

    def _reserve_all(self, state: DepthsState, positions: int) -> None:
        """Room in every cache; they share one rotary table."""
        first, *others = state.depths
        self._reserve(first, positions)
        for depth in others:
            depth.cache.reserve(positions, limit=self.config.max_position_embeddings)
            depth.rope = first.rope


def _moved_left(mask: Tensor) -> Tensor:
    """[batch, seq] bool: True where the slot to the right is."""
    moved = torch.zeros_like(mask)
    moved[:, :-1] = mask[:, 1:]
    return moved
