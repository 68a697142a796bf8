"""Training data made again from a store, under any rule: what would be trained, and files for other trainers.

    runs of a store -> groups -> credit and selection (`trainer.units.Sealer`) -> rows -> lines of a table -> file

The same code that seals units for training selects and credits here, so that what is shown is what would be trained.
Nothing here needs torch. One group is in memory at a time. Only what the columns name is written: no metadata of runs,
no fields of requests, no keys.
"""

from gyre_sdk.export.materialise import GroupSamples, materialise
from gyre_sdk.export.tables import FORMATS, export

__all__ = ["FORMATS", "GroupSamples", "export", "materialise"]
