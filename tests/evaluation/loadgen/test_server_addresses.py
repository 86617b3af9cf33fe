import pytest

from octavo.loadgen.servers import ServerAddress


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("http://127.0.0.1:8000", ServerAddress("http", "http://127.0.0.1:8000")),
        ("http://h:1/v1/", ServerAddress("http", "http://h:1")),
        ("https://h/base/v1/chat/completions", ServerAddress("http", "https://h/base", tls=True)),
        ("https://h/v1/completions", ServerAddress("http", "https://h", tls=True)),
        ("http+unix:/run/http.sock", ServerAddress("http", "http://localhost", socket="/run/http.sock")),
        ("http+unix:///run/http.sock", ServerAddress("http", "http://localhost", socket="/run/http.sock")),
        ("127.0.0.1:50051", ServerAddress("grpc", "127.0.0.1:50051")),
        ("unix:/run/frontend.sock", ServerAddress("grpc", "unix:/run/frontend.sock")),
        ("grpc://h:1", ServerAddress("grpc", "h:1")),
        ("grpcs://h:1/", ServerAddress("grpc", "h:1", tls=True)),
    ],
)
def test_an_address_is_read_and_shown_so_that_it_is_read_again(text: str, target: ServerAddress) -> None:
    assert ServerAddress.parse(text) == target
    assert ServerAddress.parse(str(target)) == target


@pytest.mark.parametrize("text", ["", "localhost", "http://", "ftp://h:1", "grpc://", "http+unix:", "https:///v1"])
def test_what_is_no_address_is_told_with_what_would_be(text: str) -> None:
    with pytest.raises(ValueError, match=r"write http://HOST:PORT"):
        ServerAddress.parse(text)


@pytest.mark.parametrize("text", ["http://h:eighty", "http://h:99999", "http://h:0"])
def test_a_port_must_be_one(text: str) -> None:
    with pytest.raises(ValueError, match=r"[Pp]ort"):
        ServerAddress.parse(text)


@pytest.mark.parametrize("text", ["http://me:secret@h:1", "http://h:1?key=secret", "http://h:1#secret"])
def test_an_address_holds_no_secrets_which_reports_would_show(text: str) -> None:
    with pytest.raises(ValueError, match="OCTAVO_API_KEY") as caught:
        ServerAddress.parse(text)
    assert "secret" not in str(caught.value)
