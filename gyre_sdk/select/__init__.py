"""Which paths of a run become trajectories, and which of their tokens each of them owns.

Selection comes first, ownership second: a *rule* chooses among the candidate paths and says in which order they claim;
then every target goes to the first chosen path that runs through it, so that each sampling event is trained at most once
and a path that is not chosen never owns anything. The outcome depends on the tree, the rule, its settings and the seed,
and on nothing else: not on the process, not on the order in which calls arrived.
"""

from gyre_sdk.select.choosing import Selected, role_of_leaf, select
from gyre_sdk.select.rules import J_MAX, ROLES, RULES, Candidate, Choices, Claims, Role, Rule, ordered_roles

__all__ = [
    "J_MAX",
    "ROLES",
    "RULES",
    "Candidate",
    "Choices",
    "Claims",
    "Role",
    "Rule",
    "Selected",
    "ordered_roles",
    "role_of_leaf",
    "select",
]
