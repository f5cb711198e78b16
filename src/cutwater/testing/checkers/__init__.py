"""The guarantees as checks over the history of a cluster, simulated or real: what clients did and saw, what was
decided, and what the disks hold. Nothing here runs a cluster."""
