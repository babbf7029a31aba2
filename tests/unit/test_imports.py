"""While modules are imported nothing is collected, and afterwards everything is as it was."""

import gc

import pytest

from cluster.imports import uncollected


def test_nothing_is_collected_meanwhile_and_what_is_there_is_never_looked_at_again():
    before = gc.get_freeze_count()
    kept = [[] for _ in range(100)]
    try:
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(kept)
    finally:
        gc.unfreeze()


def test_an_import_that_fails_leaves_the_collector_on():
    try:
        with pytest.raises(ImportError), uncollected():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_who_has_switched_it_off_is_left_alone():
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
