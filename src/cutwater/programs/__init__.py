"""Programs of jobs: packed as a zip, stored in the log by their SHA-256, and unpacked where they run.

``packing`` and ``unpacking`` are the archive, ``program_store`` is the log, ``content_cache`` and ``program_cache`` are
the disk of an agent, ``requirements`` and ``environments`` the packages that a program needs, and ``job_logs`` what it
printed. Not here: what runs programs (``jobs``, ``agent``), and keeping them over a trim (``metadata.internal``).
"""
