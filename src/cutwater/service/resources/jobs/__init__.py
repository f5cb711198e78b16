"""Jobs, their operations and savepoints, what they print, the agents that run them, and their programs.

The cluster decides and remembers, and agents look into files and programs. Nothing here imports a program.
"""
