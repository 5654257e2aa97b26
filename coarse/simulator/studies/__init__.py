"""The systems of other documents, simulated as mechanisms and compared with each document's own figures.

A study is a package in this folder. `catalogue` lists them, `study` defines their results.
"""
