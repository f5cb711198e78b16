"""The REST service: resources of a cluster over HTTP, for programs without the client library and for browsers.

``app`` answers a request by the table of ``routes``; ``resources`` has the handlers; ``gateway`` keeps connections to
the cluster, one per token: the service acts with the rights of its callers, and has none itself. It is stateless, so
any number of services may run. Not here: what requests mean (``admin``, ``core``), and no program is ever imported.
"""
