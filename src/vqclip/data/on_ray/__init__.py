"""Run the numbered items of a job, such as its shards, on Ray Data: on this machine, or on a cluster.

Ray starts workers, adds and removes them, and runs an item again whose worker or machine died. So items must be
repeatable: a shard that is finished is found. Workers and the driver communicate through a folder that all machines
share; only numbers pass through Ray.

    connection  ->  cluster (items to results)  ->  worker (opens the job, replies)
"""

from vqclip.data.on_ray.cluster import RayCluster
from vqclip.data.on_ray.connection import connect_to_ray
from vqclip.data.on_ray.mark import ShareMark
from vqclip.data.on_ray.options import RayOptions
from vqclip.data.on_ray.worker import RayJob

__all__ = ["RayCluster", "RayJob", "RayOptions", "ShareMark", "connect_to_ray"]
