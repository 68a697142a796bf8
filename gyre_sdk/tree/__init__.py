"""The token tree of a run: which recorded calls share which tokens, and who sampled what.

A compressed radix tree over whole token sequences (prompt + sampled ids of a call), with numpy edges. Nodes know tokens
only. *Calls* own sampled tokens: a sampling event is a `(call, offset)` pair, so equal tokens that were sampled twice
are two events, and a copy of a sampled token in a later prompt is context (arXiv:2609.33848 trains sampled tokens only).

A call *continues* the call whose prompt + sampled ids are the longest proper prefix of its prompt, whole. A prompt that
keeps only a part of an answer continues nothing of it: that part is context there. Parents are worked out from the
tokens of all calls together, so the order in which calls arrive cannot change a path.

Invariants (property tests in `tests/test_tree.py`):

* the concatenation along a call's path is its prompt + sampled ids;
* the spans of all paths together hold every sampling event, each under one call;
* no two children of a node start with the same token;
* the set of paths does not depend on the order of insertion.

Cost: an insertion verifies every token of the prompt against the tree (more than a billion tokens a second), and allocates
only for tokens that are new. Splitting an edge makes two views of it. Edges that hang below each other usually lie side
by side in memory and are then compared in one go, so a chain of n calls costs n comparisons and not n edges each.
"""

from gyre_sdk.tree.calls import SampledCall, Untrained
from gyre_sdk.tree.run import Path, Placement, RunTree, Span

__all__ = ["Path", "Placement", "RunTree", "SampledCall", "Span", "Untrained"]
