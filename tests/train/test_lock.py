"""One run at a time uses a training folder; a killed process leaves no lock behind."""

import os
import signal
import threading

import pytest

from dgemma.train.lock import lock_folder


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    ready, tell = os.pipe()
    process = os.fork()
    if process == 0:
        with lock_folder(tmp_path):
            os.write(tell, b"x")
            signal.pause()
    os.read(ready, 1)
    with pytest.raises(ValueError, match="must be a folder that no other run is using"), lock_folder(tmp_path):
        pass
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    with lock_folder(tmp_path):
        pass


def test_a_thread_may_lock_twice_and_another_thread_may_not(tmp_path):
    errors = []

    def other():
        try:
            with lock_folder(tmp_path):
                pass
        except ValueError as error:
            errors.append(error)

    with lock_folder(tmp_path), lock_folder(tmp_path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
    assert len(errors) == 1
