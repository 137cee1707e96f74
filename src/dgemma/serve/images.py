"""Pictures of requests: data URLs, and others if the server may fetch them; bounded before they are decoded."""

from collections.abc import Mapping, Sequence

from dgemma.checkpoint.images import is_data_url, open_image, processor_of
from dgemma.model.denoiser import Denoiser
from dgemma.model.vision.images import Images
from dgemma.serve.errors import ApiError
from dgemma.serve.fetch import fetch
from dgemma.serve.protocol import ChatMessage, ImagePart

_MOST_IMAGES = 16  # of a request
_MOST_PIXELS = 1 << 24  # of a picture


def chat_urls(messages: Sequence[ChatMessage]) -> dict[str, str]:
    """Return the URLs of a chat's pictures, by their places in the request."""
    return {
        f"messages.{number}.content.{at}.image_url.url": part.image_url.url
        for number, message in enumerate(messages)
        for at, part in enumerate(message.parts)
        if isinstance(part, ImagePart)
    }


def read_images(model: Denoiser, urls: Mapping[str, str], *, may_fetch: bool) -> Images | None:
    """Return pictures as the model reads them, None without pictures; raise a 400 that names a place."""
    if not urls:
        return None
    if not model.takes_images:
        raise _refusal(next(iter(urls)), "must be absent: this model has no vision tower.")
    if len(urls) > _MOST_IMAGES:
        place = next(iter(urls)).partition(".")[0]
        raise _refusal(place, f"must have at most {_MOST_IMAGES} images, got {len(urls)}.")
    processor, found = processor_of(model), []
    for place, url in urls.items():
        is_data = is_data_url(url)
        if not (is_data or may_fetch):
            raise _refusal(place, "must be a data URL (data:image/png;base64,…): this server fetches no other URLs.")
        try:
            picture = url if is_data else fetch(url)
        except ValueError as error:
            raise _refusal(place, f"must be a public picture: {error}.") from None
        try:  # the library would open a path, so it gets data only
            found.append(processor([open_image(picture, most_pixels=_MOST_PIXELS)]))
        except ValueError as error:
            raise _refusal(place, str(error).removeprefix("image ").removeprefix("URL ")) from None
    return Images.join(found)


def _refusal(place: str, rule: str) -> ApiError:
    return ApiError(400, f"{place} {rule}", param=place, code="invalid_value")
