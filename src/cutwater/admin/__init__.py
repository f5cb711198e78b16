"""Operations on a cluster: typed, without printing; used by the command line, the dashboard and tests."""
