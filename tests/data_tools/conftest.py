from tests.data.conftest import cache as cache
from tests.data.conftest import server as server
