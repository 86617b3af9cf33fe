import pytest

from octavo.loadgen.servers import Target


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("http://127.0.0.1:8000", Target("http", "http://127.0.0.1:8000")),
        ("http://h:1/v1/", Target("http", "http://h:1")),
        ("https://h/base/v1/chat/completions", Target("http", "https://h/base", tls=True)),
        ("https://h/v1/completions", Target("http", "https://h", tls=True)),
        ("http+unix:/run/http.sock", Target("http", "http://localhost", socket="/run/http.sock")),
        ("http+unix:///run/http.sock", Target("http", "http://localhost", socket="/run/http.sock")),
        ("127.0.0.1:50051", Target("grpc", "127.0.0.1:50051")),
        ("unix:/run/frontend.sock", Target("grpc", "unix:/run/frontend.sock")),
        ("grpc://h:1", Target("grpc", "h:1")),
        ("grpcs://h:1/", Target("grpc", "h:1", tls=True)),
    ],
)
def test_an_address_is_read_and_shown_so_that_it_is_read_again(text: str, target: Target) -> None:
    assert Target.parse(text) == target
    assert Target.parse(str(target)) == target


@pytest.mark.parametrize("text", ["", "localhost", "http://", "ftp://h:1", "grpc://", "http+unix:", "https:///v1"])
def test_what_is_no_address_is_told_with_what_would_be(text: str) -> None:
    with pytest.raises(ValueError, match=r"write http://HOST:PORT"):
        Target.parse(text)


@pytest.mark.parametrize("text", ["http://h:eighty", "http://h:99999", "http://h:0"])
def test_a_port_must_be_one(text: str) -> None:
    with pytest.raises(ValueError, match=r"[Pp]ort"):
        Target.parse(text)


@pytest.mark.parametrize("text", ["http://me:secret@h:1", "http://h:1?key=secret", "http://h:1#secret"])
def test_an_address_holds_no_secrets_which_reports_would_show(text: str) -> None:
    with pytest.raises(ValueError, match="OCTAVO_API_KEY") as caught:
        Target.parse(text)
    assert "secret" not in str(caught.value)
