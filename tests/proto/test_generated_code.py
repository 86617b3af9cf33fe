import subprocess
import sys


def test_the_generated_code_is_what_the_proto_files_say() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "octavo.v1.generate", "--check"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
