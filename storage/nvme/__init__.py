"""Blobs as files in a folder of this node: one file per blob, written whole or not at all.

options   what the operator sets
opening   the checks of a folder before it is used
owner     one process per folder, named to whoever comes second
tree      directories below the folder, reached without following a symbolic link
listing   what lies in it
files     the blocking file operations
reading   those of reads
blocks    bytes between memory and a file, past the page cache
changes   what callers want written or removed, each with its own end
spares    files made before they are needed
recycled  files of deleted blobs, zeroed, for the next ones
lanes     where changes wait, and from where they go together
space     how much is used, how much is being written, and whether the disk still takes more
tier      the tier: one hop to a worker thread per call, or for several
tracing   what there is, found from outside, for whoever proves a deletion
"""

from storage.nvme.options import NvmeOptions
from storage.nvme.space import NvmeState, NvmeStatistics
from storage.nvme.tier import NvmeTier
from storage.nvme.tracing import NvmeTracer

__all__ = ["NvmeOptions", "NvmeState", "NvmeStatistics", "NvmeTier", "NvmeTracer"]
