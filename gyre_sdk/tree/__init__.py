"""The token tree of a run: which recorded calls share which tokens, and who sampled what.

A compressed radix tree over whole token sequences (prompt + sampled ids of a call), with numpy edges. Nodes know tokens
only. *Calls* own sampled tokens: a sampling event is a `(call, offset)` pair, so equal tokens that were sampled twice
are two events, and a copy of a sampled token in a later prompt is context (arXiv:2609.33848 trains sampled tokens only).

A call *continues* the call whose prompt + sampled ids are the longest proper prefix of its prompt, whole. A prompt that
keeps only a part of an answer continues nothing of it: that part is context there. Nor does one that repeats it on other
expert routes. Parents are worked out from the tokens of all calls together, so the order in which calls arrive cannot
change a path. Why a call left a recorded path is kept beside it, as it was recorded.

Whatever is recorded stays in the tree; `RunTree.untrained` tells why a call is no target: it failed, was never delivered,
was a rejected attempt at a compaction, lacks log-probs or versions.

Invariants (property tests in `tests/test_tree.py`):

* the concatenation along a call's path is its prompt + sampled ids;
* the spans of all paths together hold every sampling event, each under one call;
* no two children of a node start with the same token (with routes: with the same token on the same routes);
* the set of paths does not depend on the order of insertion.

Cost: an insertion verifies every token of the prompt against the tree (more than a billion tokens a second), and allocates
only for tokens that are new: 4 to 5 bytes each, and 4 per sampled token for its log-prob (8 where 4 would round it);
versions stay spans. Splitting an edge makes two views of it. Edges that hang below each other usually lie side by side in
memory and are then compared in one go, so a chain of n calls costs n comparisons and not n edges each.
"""

from gyre_sdk.tree.calls import SampledCall, Untrained
from gyre_sdk.tree.run import Fork, Path, Placement, RunTree, Span

__all__ = ["Fork", "Path", "Placement", "RunTree", "SampledCall", "Span", "Untrained"]
