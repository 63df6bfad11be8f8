from tests.view.conftest import browser, page

__all__ = ["browser", "page"]
