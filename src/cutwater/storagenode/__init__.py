"""The storage node: turns the effects of replicas into files and messages."""
