"""Keeps staged parts, and turns the parts of a decided group into entries of its log stream.

Not here: which groups are decided (``core.publish``) and the files of parts (``storage.part_files``).
"""
