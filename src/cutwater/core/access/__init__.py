"""Access control: principals, rights, rules and quotas, folded from decisions (ADR 0050).

``rights`` is the vocabulary; ``principals``, ``rules`` and ``quotas`` are the data; ``access_decisions`` and
``access_state`` fold it; ``access_requests`` and ``access_handling`` change it; ``access_view`` answers questions.
Not here: the right that each method needs (``protocol.method_access``), and connections (``wire``).
"""
