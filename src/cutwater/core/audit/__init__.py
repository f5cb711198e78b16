"""The audit: which decisions are changes that it records, what a record says, and which records are not in the log yet.

Not here: appending records to the topic ``_audit`` (``metadata.audit_writer``), and counting denials at a server
(``access.denial_log``). ADR 0053 has the reasons.
"""
