"""Access control where things are executed: what both kinds of servers share (ADR 0052).

``access_copy`` keeps the rules current, with a lease; ``client_credentials`` turns credentials into principals;
``access_control`` authorises calls and ends what has lost its right; ``denial_counts`` counts denials;
``quota_control`` enforces quotas (ADR 0054).
Not here: the rules themselves (``core.access``), and the table of methods and rights (``protocol.method_access``).
"""
