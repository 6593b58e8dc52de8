"""Blobs as objects of an S3 bucket: one object per blob. The only room that knows aiobotocore.

options     what the operator sets, and which endpoints are refused
api         the calls that are used, typed
client      a client that follows no redirect and looks nothing up unasked
bulk        bodies in worker threads; links, its connections; exchange, what happens on one
connection  one request: its time limit and its errors
errors      foreign errors become the data plane's, each with its remedy
upload      a body that hands out copies piece by piece
download    an answer streamed into its target, of exactly the right length or not at all
erasure     deletion of every version
tracing     what there is, found from outside, for whoever proves a deletion
probing     what this bucket can do, for the operator
tier        the tier
objects     small named objects beside the blobs
"""

from storage.s3.objects import S3Objects
from storage.s3.options import S3Options
from storage.s3.probing import S3Capabilities
from storage.s3.tier import S3Tier

__all__ = ["S3Capabilities", "S3Objects", "S3Options", "S3Tier"]
