"""The resources of the API: a table of routes for each subject, and the handlers behind it.

A handler gets a parsed request and asks the cluster with the rights of its caller. Not here: HTTP (``service``), and
what the cluster does (``admin``, ``core``).
"""
