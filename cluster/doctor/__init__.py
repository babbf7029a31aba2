"""What ``paceline doctor`` checks: a module for each part of an installation, each of functions that yield findings.

Facts are gathered apart from the judgement on them, so that a test can plant a fault where it has no such machine.
"""
